"""`redraft serve`: builds the parts of a server from the settings, runs them, and takes them down in order."""

import gc
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import CommandError, say, warn
from cli.processes import begin, end_on_signals
from cli.settings import CommandConfig, settings, warn_unknown
from service.engine.heap import settle
from storage.config import StorageConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sqlalchemy import Engine as Database

    from service.app import ServeConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DRAIN_SECONDS = 30
FIRST_SWAP_SECONDS = 30.0


def serve(
    drain: Annotated[int, typer.Option(help="seconds that requests have to finish when asked to stop")] = DRAIN_SECONDS,
) -> None:
    """Serve the target with speculative decoding, over an OpenAI-compatible API."""
    begin(warn=False)
    settle(os.environ)
    end_on_signals()
    storage = settings(StorageConfig)
    database = _database(storage)  # before anything slow
    warn_unknown()
    from service.app import ServeConfig

    config = settings(ServeConfig)
    listener = listen(config.host, config.port)
    with ExitStack() as stack:
        stack.enter_context(listener)
        _run(build(stack, database, storage, listener, config), listener, drain)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow is done; raises `CommandError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CommandError(
            f"cannot listen on {host}:{port} ({error.strerror}): set REDRAFT_HOST or REDRAFT_PORT"
        ) from error
    return listener


def build(
    stack: ExitStack, database: "Database", storage: StorageConfig, listener: socket.socket, config: "ServeConfig"
) -> "FastAPI":
    """The application over running parts, which `stack` takes down again."""
    from adapter.routing import RoutingConfig
    from adapter.target import TargetConfig, load
    from adapter.typical import TypicalConfig
    from adapter.watch import WatchConfig
    from cli.attachment import Attachment
    from service.app import build_app
    from service.engine.engine import Engine, EngineConfig
    from service.engine.floor import FloorConfig
    from service.engine.governor import GovernorConfig
    from service.feedback import FeedbackConfig
    from service.live import LiveConfig
    from service.metrics import Metrics
    from storage.registry import Registry

    name, typical = settings(CommandConfig).drafter, settings(TypicalConfig).rule
    if typical is not None:
        warn("requests may ask for typical acceptance, which is LOSSY: those answers are not the target's own")
    target = load(settings(TargetConfig))
    metrics = Metrics()
    server_id = f"{socket.gethostname()}:{listener.getsockname()[1]}"
    live, feedback = settings(LiveConfig), settings(FeedbackConfig)
    routed = settings(RoutingConfig).routing != "off"
    attachment = Attachment(name, server_id, target, Registry(database), storage, live, feedback, metrics, routed)
    engine = Engine(
        target, settings(EngineConfig), attachment.finished, settings(GovernorConfig), settings(FloorConfig)
    )
    engine.start()
    stack.callback(attachment.close)  # after the engine's last request, whose feedback it writes
    stack.callback(engine.stop)
    attachment.start(engine)
    attachment.wait(FIRST_SWAP_SECONDS)
    gc.freeze()  # what is loaded now stays: walking it again would pause rounds, and take seconds at the end
    holdback = settings(WatchConfig).holdback
    return build_app(target, engine, metrics, database, lambda: attachment.drafter, config, holdback, typical)


def _database(storage: StorageConfig) -> "Database":
    """The migrated database, with an operator key in it."""
    from storage.access import ensure_operator_key
    from storage.database import check_migrated, open_database

    database = open_database(storage.sql_url)
    check_migrated(database)
    if made := ensure_operator_key(database, storage.home):
        say(f"the operator key was made: it is in {made}")
    return database


def _run(app: "FastAPI", listener: socket.socket, drain: int) -> None:
    """Serve until a signal; requests in flight get `drain` seconds."""
    import uvicorn

    host, port = listener.getsockname()[:2]
    say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}")
    if host not in LOOPBACK:
        say("other machines can reach this server: the operator's routes need the key, completions need none")
    settings_of_uvicorn: dict[str, Any] = {"log_config": None, "access_log": False, "timeout_graceful_shutdown": drain}
    uvicorn.Server(uvicorn.Config(app, **settings_of_uvicorn)).run(sockets=[listener])
