"""The watch after a promotion, or over a canary, in the worker: asks the test of each open one, and acts on it.

All that it knows stands in SQL, written as feedback is folded into the history; so it may be asked again at any
time, by any process. No torch here.
"""

from dataclasses import asdict

import structlog
from sqlalchemy import Engine

from adapter.watch import Verdict, WatchConfig, judge
from storage.canary import Canaries
from storage.registry import Registry
from storage.watches import Watch, Watches

ACTOR = "watch"

log = structlog.get_logger()


class Watcher:
    """Looks after the open watches of all drafters."""

    def __init__(self, database: Engine, config: WatchConfig) -> None:
        self._registry, self._watches, self._config = Registry(database), Watches(database), config
        self._canaries = Canaries(database)

    def look(self) -> list[Verdict]:
        """Judge every open watch, and do what the verdicts say; the pointer is moved in SQL only."""
        drafters = self._registry.drafters(include_retired=True)
        open_ones = [watch for d in drafters if (watch := self._watches.open(d.name)) is not None]
        return [self._judge(watch) for watch in open_ones]

    def _judge(self, watch: Watch) -> Verdict:
        observations = self._watches.observations(watch)
        verdict = judge(observations, watch.share, self._config, self._watches.hours(watch), watch.canary)
        self._watches.note(watch, len(observations), [asdict(f) for f in verdict.findings], verdict.reason)
        if verdict.state == "worse":
            self._take_back(watch, verdict)
        elif watch.canary and verdict.state != "watching":
            self._end_canary(watch, verdict)
        elif verdict.state != "watching":
            self._watches.close(watch, verdict.state, verdict.reason)
            log.info("watch.closed", drafter=watch.drafter, version=watch.version, state=verdict.state)
        return verdict

    def _end_canary(self, watch: Watch, verdict: Verdict) -> None:
        """Promote it, or recall it without blame; nothing happens where it is out no more."""
        canary, live = (self._registry.version(watch.drafter, number) for number in (watch.version, watch.predecessor))
        if verdict.promote:
            self._canaries.promote(canary, live, verdict.state, ACTOR, verdict.reason, self._config.holdback)
        else:
            self._canaries.recall(canary, verdict.state, ACTOR, verdict.reason)
        log.info(
            "canary.promoted" if verdict.promote else "canary.recalled",
            drafter=watch.drafter,
            version=watch.version,
            reason=verdict.reason,
        )

    def _take_back(self, watch: Watch, verdict: Verdict) -> None:
        """Roll back and quarantine; nothing happens where somebody moved the pointer meanwhile."""
        version = self._registry.version(watch.drafter, watch.version)
        moved = self._registry.take_back(version, ACTOR, verdict.reason)
        log.warning(
            "watch.taken_back",
            drafter=watch.drafter,
            version=watch.version,
            live=moved.live.number,
            reason=verdict.reason,
        )
