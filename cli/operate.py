"""`redraft promote`, `rollback` and `servers`: moving what is live, and who has it.

A move is done when it is in SQL. The Redis message only saves the servers a polling interval; then the command
waits until each server that is alive has said in SQL that it serves the new generation.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.opened import DrafterOption, JsonOption, Opened, database, open_drafter
from cli.output import CommandError, age, say, show_json, table, warn
from cli.settings import actor, settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from storage.registry import Pointer
    from storage.servers import Server

WAIT_SECONDS = 30.0
TICK_SECONDS = 0.02
NOBODY = "no server and no worker process gave a sign of life lately: start them with `redraft up` or `redraft serve`"

ReasonOption = Annotated[str, typer.Option("--reason", help="why; kept in the history and the audit log")]
WaitOption = Annotated[float, typer.Option("--wait", help="seconds to wait for the servers", min=0)]


@dataclass(frozen=True)
class Moved:
    """Where the pointer is now, and who serves it."""

    drafter: str
    version: int
    generation: int
    acknowledged: tuple[str, ...]  # server ids
    missing: tuple[str, ...]  # server ids, with the error of those that said one
    milliseconds: float  # from the command's start to the last acknowledgement, or to giving up


def promote(
    number: Annotated[int, typer.Argument(metavar="N", help="number of the version to make live")],
    reason: ReasonOption,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="take the version out of quarantine, where it is in it")
    ] = False,
    drafter: DrafterOption = "",
    wait: WaitOption = WAIT_SECONDS,
    json: JsonOption = False,
) -> None:
    """Make a version live, and wait until each server serves it; then it is watched (`redraft watch`)."""
    from adapter.watch import WatchConfig

    began = time.perf_counter()
    opened = open_drafter(drafter)
    candidate, live = opened.registry.version(opened.drafter.name, number), opened.registry.live(opened.drafter.name)
    holdback = settings(WatchConfig).holdback
    pointer = opened.registry.promote(candidate, live, actor(), _stated(reason), holdback, quarantined, recall=True)
    _finish(opened, pointer, began, wait, json)


def rollback(
    reason: ReasonOption,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="N", help="version to go back to; default: the canary is recalled, else previous"),
    ] = None,
    drafter: DrafterOption = "",
    wait: WaitOption = WAIT_SECONDS,
    json: JsonOption = False,
) -> None:
    """Take back what was deployed last, canary or live version, and return when each server has followed."""
    began = time.perf_counter()
    opened = open_drafter(drafter)
    pointer = opened.registry.rollback(opened.drafter.name, to, actor(), _stated(reason))
    _finish(opened, pointer, began, wait, json)


def _stated(reason: str) -> str:
    if not reason.strip():
        raise CommandError('state a reason: --reason "..."')
    return reason.strip()


def _finish(opened: Opened, pointer: "Pointer", began: float, seconds: float, json: bool) -> None:
    """Spread the word, wait, and say how it went; exit code 1 where a server has not followed."""
    announce_moves(opened)
    moved = wait_for_servers(opened, pointer, began, seconds)
    if json:
        show_json(moved)
    else:
        _say(moved)
    if moved.missing:
        raise CommandError(
            f"version {moved.version} is live, but not served yet by {'; '.join(moved.missing)}. They follow as soon "
            "as they can: see `redraft servers`"
        )


def announce_moves(opened: Opened) -> None:
    """Send what the outbox holds. Without Redis the servers find out by polling."""
    announce(opened.database, opened.config.stream_url)


def announce(engine: "Engine", redis_url: str) -> None:
    from redis import RedisError

    from storage.announcements import announce_pending
    from storage.redis_clients import hot

    try:
        with hot(redis_url) as client:
            announce_pending(engine, client)
    except RedisError as error:
        warn(f"Redis cannot be reached ({error}): servers find out at their next look at the database")


def wait_for_servers(opened: Opened, pointer: "Pointer", began: float, seconds: float) -> Moved:
    """Wait until each live server serves the pointer's generation or a later one."""
    from storage.servers import Servers

    servers, deadline = Servers(opened.database), time.perf_counter() + seconds
    while True:
        alive = servers.live(pointer.drafter)
        behind = [server for server in alive if server.generation < pointer.generation]
        if not behind or time.perf_counter() >= deadline:
            break
        time.sleep(TICK_SECONDS)
    return Moved(
        drafter=pointer.drafter,
        version=pointer.live.number,
        generation=pointer.generation,
        acknowledged=tuple(s.id for s in alive if s not in behind),
        missing=tuple(f"{s.id} ({s.error})" if s.error else s.id for s in behind),
        milliseconds=round((time.perf_counter() - began) * 1e3, 1),
    )


def _say(moved: Moved) -> None:
    line = f"version {moved.version} of {moved.drafter} is live (generation {moved.generation})"
    if moved.acknowledged:
        say(f"{line}; served by {', '.join(moved.acknowledged)} after {moved.milliseconds:.0f} ms")
    elif not moved.missing:
        say(f"{line}; no server is running, so nobody serves it yet ({moved.milliseconds:.0f} ms)")


def servers(json: JsonOption = False) -> None:
    """List the servers and the worker's processes that gave a sign of life lately."""
    from storage.registry import Registry
    from storage.servers import Servers

    engine = database()
    registry, found = Registry(engine), Servers(engine)
    rows: list[Server] = []
    generations: dict[str, int] = {}
    for drafter in registry.drafters():
        rows += found.live(drafter.name)
        generations[drafter.name] = registry.pointer(drafter.name).generation
    workers = found.live("")
    if json:
        show_json([*rows, *workers])
        return
    columns = ("server", "kind", "drafter", "version", "generation", "pointer", "last seen", "error")
    lines = [_cells(server, generations.get(server.drafter)) for server in (*rows, *workers)]
    table("servers and worker processes", columns, lines, right=columns[3:6], empty=NOBODY)


def _cells(server: "Server", generation: int | None) -> tuple[str, ...]:
    if generation is None:
        return server.id, server.host_kind, "-", "-", "-", "-", f"{age(server.last_seen)} ago", server.error
    return (
        server.id,
        server.host_kind,
        server.drafter,
        str(server.version),
        str(server.generation),
        str(generation) if server.generation == generation else f"{generation}, behind",
        f"{age(server.last_seen)} ago",
        server.error,
    )
