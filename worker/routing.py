"""Learned routing in the trainer: score every drafter on new windows, route by what that says, make and take back.

All that it knows stands in SQL: standings by workload and drafter, routes, and which windows were scored. So it may
run again at any time, and two trainers that do so at once count no window twice.
"""

from collections.abc import Mapping

import structlog
from sqlalchemy import Engine

from adapter.routing import Choice, RoutingConfig, Scored, choice, lagging, own_name, revised
from adapter.versions import Versions
from storage.own_drafters import OwnDrafter, OwnDrafters
from storage.registry import Drafter, Registry, UnknownDrafter
from storage.routes import GENERAL, LEARNED, MANUAL, Route, RouteIsManual, RouteRefused, Routes
from storage.standings import ByDrafter, Standing, Standings
from storage.weights import BlobDamaged, WeightsStore
from storage.windows import Windows
from worker.rescoring import Rescorer
from worker.scoring import as_it_was, score

ACTOR = "routing"
LEARNED_ROUTING = "learned"
COST_HOURS = 24.0  # that the measured times of draft steps go back
WINDOWS = 4  # scored at a time: what else the trainer has to do comes between
log = structlog.get_logger()


class Router:
    """Routes the workloads of a target, where the settings say that the machine does."""

    def __init__(
        self,
        database: Engine,
        blobs: WeightsStore,
        weights: Versions,
        config: RoutingConfig,
        general: str = "",
        rescorer: Rescorer | None = None,
    ) -> None:
        """`general` names the general drafter; "": the only one that is for all workloads."""
        self._registry, self._windows, self._weights = Registry(database), Windows(database, blobs), weights
        self._routes, self._standings, self._own = Routes(database), Standings(database), OwnDrafters(database)
        self._config, self._general, self._rescorer = config, general, rescorer

    def look(self, target_fingerprint: str) -> int:
        """Score the drafters on the windows that are new, and route; how many windows were scored."""
        if self._config.routing != LEARNED_ROUTING:
            return 0
        try:
            general = self._registry.choose(self._general, target_fingerprint)
        except UnknownDrafter as unknown:
            log.warning("routing.no_general_drafter", reason=str(unknown))
            return 0
        unscored = self._standings.unscored(target_fingerprint)[:WINDOWS]
        scored = sum(self._score(window, target_fingerprint) for window in unscored)
        if scored:
            self._choose(general)
            self._make(general)
        self._give_back_idle(target_fingerprint)
        return scored

    def _score(self, window_id: int, target_fingerprint: str) -> bool:
        """Put one window's requests into the standings; False where somebody else did."""
        window = self._windows.window(window_id)
        drafters = [d for d in self._registry.drafters() if d.target_fingerprint == target_fingerprint]
        try:
            records = self._windows.records(window)
        except BlobDamaged as error:
            log.warning("routing.window_unreadable", window=window_id, reason=str(error))
            return self._standings.revise(target_fingerprint, window_id, lambda known: {})
        present = as_it_was(self._registry, drafters, window)
        both = (*records.training, *records.holdout)
        requests, versions = score(both, present, window.drafter, self._weights, self._rescorer)
        costs = self._costs(list(versions))

        def change(known: Mapping[str, ByDrafter]) -> dict[str, dict[str, Standing]]:
            grouped: dict[str, list[Scored]] = {}
            for request in requests:
                grouped.setdefault(request.workload, []).append(request)
            return {w: revised(known.get(w, {}), found, versions, costs) for w, found in grouped.items()}

        return self._standings.revise(target_fingerprint, window_id, change)

    def _costs(self, drafters: list[str]) -> dict[str, float]:
        """Of a draft step, in target passes; nothing where not all were measured: guesses would decide."""
        known = self._standings.draft_costs(drafters, COST_HOURS)
        return known if len(known) == len(drafters) else {}

    def _choose(self, general: Drafter) -> None:
        """Change the routes of workloads that another drafter clearly does better on."""
        routes = self._present(general.target_fingerprint)
        for workload, standings in sorted(self._standings.of(general.target_fingerprint).items()):
            route = routes.get(workload)
            serving = route.drafter if route else general.name
            if (route and route.cause == MANUAL) or not self._enough(standings, general):
                continue
            found = choice(standings, serving, general.name)
            if found is not None:
                self._change(workload, serving, found, general)

    def _change(self, workload: str, serving: str, to: Choice, general: Drafter) -> None:
        target = general.target_fingerprint
        try:
            if to.drafter == general.name:
                self._routes.remove(target, workload, LEARNED, ACTOR, to.reason)
            else:
                self._routes.put(target, workload, to.drafter, LEARNED, ACTOR, to.reason)
        except (RouteIsManual, RouteRefused) as overtaken:  # by an operator, since we looked
            log.info("routing.overtaken", workload=workload, reason=str(overtaken))
            return
        log.info("routing.changed", workload=workload, drafter=to.drafter, before=serving, reason=to.reason)
        routed = {route.drafter for route in self._routes.of(target)}
        for own in self._own.of(target):
            if own.name == serving and own.name not in routed:
                self._give_back(own, f"workload {workload} went to {to.drafter}: {to.reason}")

    def _make(self, general: Drafter) -> None:
        """A drafter of its own for workloads that the general one is clearly worse on; most traffic goes first."""
        target, routes = general.target_fingerprint, self._present(general.target_fingerprint)
        elsewhere = {workload for workload, route in routes.items() if route.drafter != GENERAL}
        served = {
            workload: standings[general.name]
            for workload, standings in self._standings.of(target).items()
            if workload not in elsewhere and self._enough(standings, general)
        }
        shares = self._standings.shares(target, self._config.routing_silence_hours)
        for workload in sorted(served.keys() - routes.keys(), key=lambda w: (-shares.get(w, 0.0), w)):
            share = shares.get(workload, 0.0)
            reason = lagging(workload, served) if share >= self._config.routing_share else ""
            if reason:
                self._make_one(general, workload, f"{reason}, with {share:.0%} of the traffic")

    def _make_one(self, general: Drafter, workload: str, reason: str) -> None:
        most = self._config.routing_drafters
        made = self._own.make(
            general.name, workload, most, lambda taken: own_name(general.name, workload, taken), ACTOR, reason
        )
        if made is None:
            log.info("routing.no_place", workload=workload, drafters=most, reason=reason)
        else:
            log.info("routing.made", workload=workload, drafter=made, reason=reason)

    def _give_back_idle(self, target_fingerprint: str) -> None:
        for own in self._own.of(target_fingerprint):
            if own.idle_hours >= self._config.routing_silence_hours:
                self._give_back(own, f"nothing came in for it for {own.idle_hours:.0f} hours")

    def _give_back(self, own: OwnDrafter, reason: str) -> None:
        if self._own.give_back(own, ACTOR, reason):
            log.info("routing.given_back", drafter=own.name, workload=own.workload, reason=reason)

    def _enough(self, standings: ByDrafter, general: Drafter) -> bool:
        return general.name in standings and standings[general.name].scored >= self._config.routing_requests

    def _present(self, target_fingerprint: str) -> dict[str, Route]:
        return {route.workload: route for route in self._routes.of(target_fingerprint)}
