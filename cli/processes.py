"""The long-running processes besides serving, and what belongs to them: migrate, trainer, housekeeper, beat,
the embedded Valkey, and `alive`, the health check of the worker's processes.
"""

import os
import signal
import socket
import threading
from dataclasses import replace
from typing import Annotated

import typer

from cli import logs
from cli.children import follow_parent
from cli.output import CommandError, age, say
from cli.settings import settings, warn_unknown
from storage.config import StorageConfig

ALIVE_SECONDS = 20.0
WORKER_OPTIONS = (
    "--pool=solo",
    "--concurrency=1",
    "--without-gossip",
    "--without-mingle",
    "--without-heartbeat",
    "--loglevel=INFO",
)


def begin(warn: bool = True) -> None:
    """What every long-running process does first. To know all settings takes torch: only who needs it warns."""
    logs.configure()
    follow_parent()
    if warn:
        warn_unknown()


def end_on_signals() -> None:
    """Leave through all `finally` blocks when asked to. uvicorn raises its signals once more when it has stopped."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def migrate() -> None:
    """Bring the database to this version's tables."""
    from storage.database import migrate as upgrade
    from storage.database import open_database

    logs.configure(replace(settings(logs.LogConfig), log_level="WARNING"))
    upgrade(open_database(settings(StorageConfig).sql_url))
    say("the database is at this version's revision")


def trainer() -> None:
    """Run the trainer: takes due updates, one at a time."""
    begin()
    from worker.app import ADAPT_QUEUE
    from worker.config import TrainerConfig

    os.nice(settings(TrainerConfig).trainer_nice)
    _work("trainer", ADAPT_QUEUE)


def housekeeper() -> None:
    """Run the housekeeper: folds the history, finds due updates, rings again, deletes garbage."""
    begin(warn=False)
    from worker.app import HOUSEKEEPING_QUEUE

    _work("housekeeper", HOUSEKEEPING_QUEUE)


def _work(role: str, queue: str) -> None:
    from celery import signals

    from worker.app import app

    signals.setup_logging.connect(_keep_our_logging)
    app.worker_main(["--quiet", "worker", f"--hostname={role}@%h", f"--queues={queue}", *WORKER_OPTIONS])


def beat() -> None:
    """Run the clock: rings the housekeeper's bells. Exactly one."""
    begin(warn=False)
    from celery import signals

    from worker.app import app

    signals.setup_logging.connect(_keep_our_logging)
    home = settings(StorageConfig).home
    home.mkdir(parents=True, exist_ok=True)
    app.start(["--quiet", "beat", f"--schedule={home / 'beat.schedule'}", "--pidfile=", "--loglevel=INFO"])


def _keep_our_logging(**_: object) -> None:
    """With a listener on `setup_logging`, Celery leaves the loggers as they are."""


def valkey() -> None:
    """Run the embedded Valkey of the home folder, for `redraft up`."""
    begin(warn=False)
    from storage.redis_clients import admin
    from storage.valkey import answers, start_valkey

    config = settings(StorageConfig)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    config.home.mkdir(parents=True, exist_ok=True)
    with start_valkey(config.socket, config.home.absolute() / "valkey") as server:
        while not stopping.wait(0.2):
            if not server.running() or (server.process is None and not answers(config.socket)):
                raise CommandError(f"the Valkey server ended: read {config.home / 'valkey' / 'valkey.log'}")
        if server.process is None:  # left over by a `redraft up` that was killed: it ends with this one
            with admin(server.url) as client:
                client.shutdown()


def alive(
    role: Annotated[str, typer.Argument(help="trainer, housekeeper or beat")],
    within: Annotated[float, typer.Option(help="age in seconds of the last sign of life")] = ALIVE_SECONDS,
) -> None:
    """Exit 0 if this host's process of that role gave a sign of life lately, else 1."""
    from storage.database import open_database
    from storage.servers import Servers

    seen = Servers(open_database(settings(StorageConfig).sql_url)).live("", within)
    here = [s for s in seen if s.host_kind == role and s.id.split(":")[1:2] == [socket.gethostname()]]
    if not here:
        raise CommandError(f"no {role} on {socket.gethostname()} gave a sign of life within {within:g} s")
    say(f"{here[0].id} was seen {age(here[0].last_seen)} ago")
