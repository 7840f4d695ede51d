"""The demo's story, in order: traffic of two workloads, learning, a comparison, a rollback and the way forward."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from cli.demo.comparison import fixed
from cli.demo.finale import compare
from cli.demo.progress import Progress
from cli.demo.prompts import Workload, workloads
from cli.demo.report import Report, report_of, write
from cli.demo.traffic import Clients
from cli.demo.view import View, comparison_table
from cli.opened import Opened
from cli.supervisor import Stack
from service.engine.engine import EngineConfig
from storage.config import StorageConfig, read
from storage.database import migrate, open_database
from storage.jobs import Jobs
from storage.registry import Registry
from storage.weights import WeightsStore
from storage.windows import Windows

ACTOR = "demo"
COMPARED_AT_ONCE = 8
MAX_TOKENS = 96
UNSEEN = 12
CONCURRENCY = 16
WINDOWS = 5  # updates that the traffic is meant to start
NOTICE_SECONDS = 8.0  # within which the sweep has noticed that an update is due, after the traffic or another update
LEARNING_SECONDS = 600.0  # how long the updates that are still due may take after the traffic has ended
TICK_SECONDS = 1.0


def demo_environ(environ: Mapping[str, str], requests: int, drafter: str) -> dict[str, str]:
    """Settings for a demo of so many requests: small windows, so that several updates happen within minutes."""
    window = max(8, requests // WINDOWS)
    ours = {
        "REDRAFT_DRAFTER": drafter,
        "REDRAFT_WINDOW_RECORDS": str(window),
        "REDRAFT_WINDOW_AGE_SECONDS": "3600",
        "REDRAFT_WINDOW_MINIMUM": str(window // 2),
        "REDRAFT_MINIMUM_REQUESTS": "2",
        "REDRAFT_HOLDBACK": "0",  # its figures are the live version's alone
    }
    return {**ours, **environ}


def tell(console: Console, requests: int, kind: str, environ: Mapping[str, str], folder: Path) -> Report:
    """The whole demo; the report says in `shortfalls` what did not happen."""
    began = time.perf_counter()
    storage = read(StorageConfig, environ)
    drafter = fresh_name(storage)
    with Stack(storage, demo_environ(environ, requests, drafter), console.print, ("--kind", kind)) as stack:
        opened = _open(storage, drafter)
        parts = workloads(requests, UNSEEN)
        console.print(f"{stack.url}, {kind}: {requests} requests of {MAX_TOKENS} tokens, {CONCURRENCY} at a time")
        progress = Progress(opened.registry, drafter, requests)
        k = read(EngineConfig, environ).draft_length
        _send_traffic(console, stack.url, parts, k, progress, lambda: _settled(opened))
        console.print("comparing plain decoding, the first and the last version on unseen prompts")
        finale = compare(Clients(stack.url, MAX_TOKENS, COMPARED_AT_ONCE), opened, parts, environ)
        report = report_of(kind, progress, finale, time.perf_counter() - began)
    console.print(comparison_table(report.comparison))
    write(report, progress.answers, folder)
    return report


def fresh_name(storage: StorageConfig) -> str:
    """A name for this demo's drafter. An earlier demo's is retired, so that `redraft up` finds this one."""
    database = open_database(storage.sql_url)
    migrate(database)
    registry = Registry(database)
    names = {drafter.name for drafter in registry.drafters(include_retired=True)}
    earlier = [name for name in names if name == "demo" or name.startswith("demo-")]
    for name in earlier:
        registry.retire_drafter(name, ACTOR)
    return "demo" if not earlier else f"demo-{len(earlier) + 1}"


def _open(storage: StorageConfig, drafter: str) -> Opened:
    database = open_database(storage.sql_url)
    registry = Registry(database)
    return Opened(storage, database, registry, registry.drafter(drafter))


def _send_traffic(
    console: Console,
    url: str,
    parts: tuple[Workload, ...],
    draft_length: int,
    progress: Progress,
    settled: Callable[[], bool],
) -> None:
    """One workload after the other, and then quiet until the last update is decided.

    All requests ask for one draft length: a governor would decode plainly until the drafter is worth it, and
    nothing of its learning would be seen.
    """
    clients = Clients(url, MAX_TOKENS, CONCURRENCY)
    with View(console, progress, " then ".join(part.name for part in parts)):
        for part in parts:
            clients.send(part.name, part.traffic, fixed(draft_length), each=progress.add)
        until_quiet(settled)


def until_quiet(
    settled: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until nothing has been under way for a while: a kind that learns slowly has windows waiting in a row."""
    quiet_since = began = clock()
    while clock() - quiet_since < NOTICE_SECONDS and clock() - began < LEARNING_SECONDS:
        sleep(TICK_SECONDS)
        if not settled():
            quiet_since = clock()


def _settled(opened: Opened) -> bool:
    """Whether no update is under way or about to start."""
    busy = any(job.state in ("queued", "running") for job in Jobs(opened.database).recent())
    windows = Windows(opened.database, WeightsStore(opened.config.weights_folder))
    return not busy and windows.open(opened.drafter.name) is None
