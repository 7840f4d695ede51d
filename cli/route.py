"""`redraft route`: which drafter proposes for which workload, since when and why; and setting it by hand.

What is set here stays: the trainer changes only its own routes. Servers hear of a change at once over Redis, or at
their next look at the database. The feedback of a routed workload trains its own drafter only: the general drafter
learns no more from it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli.opened import DrafterOption, JsonOption, Opened, database, open_drafter
from cli.operate import announce
from cli.output import CommandError, age, figure, say, show_json, table, warn
from cli.settings import CommandConfig, actor, settings
from storage.config import StorageConfig

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from storage.registry import Registry
    from storage.routes import Route
    from storage.standings import Score, Standing

COLUMNS = ("workload", "drafter", "cause", "since", "weights", "acceptance probability", "why")
NONE = "no workload is routed: {} proposes for all of them. `redraft route WORKLOAD DRAFTER` sets a route"
FOLLOW = {
    "off": "REDRAFT_ROUTING is off: servers do not follow routes",
    "label": "servers follow these routes; only you change them (REDRAFT_ROUTING=label)",
    "learned": "servers follow these routes; the trainer changes those that you did not set (REDRAFT_ROUTING=learned)",
}


@dataclass(frozen=True)
class Scores:
    """A drafter on a workload, as it was last scored."""

    drafter: str
    version: int
    weight: float
    requests: int  # scored in all
    acceptance_probability: "dict[str, Score]"  # by policy


@dataclass(frozen=True)
class Line:
    """A workload that is routed, or that drafters were scored on."""

    workload: str
    drafter: str
    cause: str  # manual, learned, novel; general where there is no route
    actor: str
    since: datetime | None
    reason: str
    drafters: tuple[Scores, ...]  # the heaviest first


def route(
    workload: Annotated[str, typer.Argument(help="the label that requests carry; without it, routes are listed")] = "",
    to: Annotated[str, typer.Argument(metavar="DRAFTER", help="the drafter that is to propose for it")] = "",
    general: Annotated[bool, typer.Option("--general", help="the general drafter is to propose for it")] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="take your route away: the general drafter, or what the trainer learns")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="why; kept in the audit log")] = "",
    drafter: DrafterOption = "",
    json: JsonOption = False,
) -> None:
    """List which drafter proposes for which workload, or set it. Only that drafter learns from the workload then."""
    asked = sum((bool(to), general, auto))
    if asked > 1 or (asked and not workload) or (workload and not asked):
        raise CommandError("give a WORKLOAD and one of DRAFTER, --general and --auto; or nothing, to list the routes")
    if not workload:
        _list(open_drafter(drafter), json)
        return
    target = _set(workload, to, drafter, auto, reason)
    _show_one(target, workload, drafter, json)


def _set(workload: str, to: str, drafter: str, auto: bool, reason: str) -> str:
    """Carry it out and spread the word; the target's fingerprint."""
    from storage.registry import Registry
    from storage.routes import GENERAL, MANUAL, Routes

    engine = database()
    registry, routes = Registry(engine), Routes(engine)
    target = registry.drafter(to).target_fingerprint if to else open_drafter(drafter).drafter.target_fingerprint
    if auto:
        routes.remove(target, workload, MANUAL, actor(), reason)
    else:
        name = GENERAL if to == _general(registry, drafter, target) else to
        routes.put(target, workload, name, MANUAL, actor(), reason)
    announce(engine, settings(StorageConfig).stream_url)
    return target


def _show_one(target: str, workload: str, drafter: str, json: bool) -> None:
    from adapter.routing import RoutingConfig
    from storage.registry import Registry

    engine = database()
    general = _general(Registry(engine), drafter, target)
    found = next((line for line in lines(engine, target, general) if line.workload == workload), None)
    if json:
        show_json(found or Line(workload, general, "general", "", None, "", ()))
    else:
        served = found.drafter if found else general
        say(f"{served or 'the general drafter'} proposes for workload {workload} from now on, and learns from it")
    if settings(RoutingConfig).routing == "off":
        warn(FOLLOW["off"])


def _general(registry: "Registry", drafter: str, target: str) -> str:
    """The general drafter's name; "" where it cannot be told."""
    from storage.registry import UnknownDrafter, WrongDrafter

    try:
        return registry.choose(drafter or settings(CommandConfig).drafter, target).name
    except (UnknownDrafter, WrongDrafter):
        return ""


def _list(opened: Opened, json: bool) -> None:
    from adapter.routing import RoutingConfig

    found = lines(opened.database, opened.drafter.target_fingerprint, opened.drafter.name)
    if json:
        show_json(found)
        return
    table("", COLUMNS, [_cells(line) for line in found], empty=NONE.format(opened.drafter.name))
    say(FOLLOW[settings(RoutingConfig).routing])


def lines(engine: "Engine", target: str, general: str) -> list[Line]:
    """By workload: those with a route, and those that drafters were scored on."""
    from storage.routes import Routes
    from storage.standings import Standings

    routes = {found.workload: found for found in Routes(engine).of(target)}
    standings = Standings(engine).of(target)
    return [
        _line(workload, routes.get(workload), standings.get(workload, {}), general)
        for workload in sorted({*routes, *standings})
    ]


def _line(workload: str, found: "Route | None", standings: "dict[str, Standing]", general: str) -> Line:
    scores = [
        Scores(name, one.version, round(one.weight, 4), one.scored, dict(one.scores)) for name, one in standings.items()
    ]
    heaviest = tuple(sorted(scores, key=lambda one: (-one.weight, one.drafter)))
    if found is None:
        return Line(workload, general, "general", "", None, "", heaviest)
    return Line(workload, found.drafter or general, found.cause, found.actor, found.at, found.reason, heaviest)


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.workload,
        line.drafter,
        f"{line.cause} ({line.actor})" if line.actor else line.cause,
        f"{age(line.since)} ago" if line.since else "-",
        ", ".join(f"{one.drafter} {figure(one.weight)}" for one in line.drafters) or "-",
        ", ".join(f"{one.drafter} v{one.version} {_probabilities(one)}" for one in line.drafters) or "-",
        line.reason or "-",
    )


def _probabilities(one: Scores) -> str:
    return " ".join(f"{figure(score.mean)} ({policy})" for policy, score in sorted(one.acceptance_probability.items()))
