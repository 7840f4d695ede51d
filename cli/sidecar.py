"""`redraft sidecar`: puts the reverse proxy before an engine, from the settings, and takes it down in order."""

import logging
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import CommandError, say, warn
from cli.processes import begin, end_on_signals
from cli.serve import LOOPBACK, listen
from cli.settings import CommandConfig, settings, warn_unknown
from cli.swapping import Swap, Swaps, known
from storage.config import StorageConfig

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from service.hosts.sidecar.app import Sidecar
    from service.hosts.sidecar.attachment import Attachment
    from service.hosts.sidecar.config import SidecarConfig
    from service.hosts.sidecar.engine_client import EngineClient
    from service.hosts.sidecar.scraper import Scraper
    from service.hosts.sidecar.upstream import Upstream

DRAIN_SECONDS = 30


def sidecar(
    url: Annotated[str, typer.Argument(help="the engine's address, such as http://127.0.0.1:8000")],
    swap: Annotated[Swap, typer.Option(help="how the engine takes new versions")] = Swap.NONE,
    drain: Annotated[int, typer.Option(help="seconds that requests have to finish when asked to stop")] = DRAIN_SECONDS,
) -> None:
    """Observe an engine that stays as it is, from a proxy before it: vLLM, SGLang or llama.cpp."""
    begin(warn=False)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each look at the engine's metrics
    end_on_signals()
    from service.hosts.sidecar.config import SidecarConfig
    from service.hosts.sidecar.upstream import Upstream, WrongUrl

    config = settings(SidecarConfig)
    try:
        upstream = Upstream(url)
    except WrongUrl as wrong:
        raise CommandError(str(wrong)) from wrong
    listener = _listen(config)
    with ExitStack() as stack:
        stack.enter_context(listener)
        app = build(stack, upstream, swap, config, listener)
        _run(app, listener, drain, url)


def _listen(config: "SidecarConfig") -> socket.socket:
    try:
        return listen(config.sidecar_host, config.sidecar_port)
    except CommandError as error:
        message = str(error).replace("REDRAFT_HOST or REDRAFT_PORT", "REDRAFT_SIDECAR_HOST or REDRAFT_SIDECAR_PORT")
        raise CommandError(message) from error


def build(
    stack: ExitStack, upstream: "Upstream", swap: Swap, config: "SidecarConfig", listener: socket.socket
) -> "Sidecar":
    """The proxy over running parts, which `stack` takes down again. No database or engine is needed for that."""
    from service.hosts.sidecar.app import Sidecar
    from service.hosts.sidecar.attachment import REFUSED_SECONDS
    from service.hosts.sidecar.engine_client import EngineClient
    from service.hosts.sidecar.observing import Observer
    from service.hosts.sidecar.own import Own
    from service.hosts.sidecar.paths import passes
    from storage.database import open_database
    from storage.registry import Registry

    storage = settings(StorageConfig)
    registry = Registry(open_database(storage.sql_url))
    host, port = listener.getsockname()[:2]
    client = EngineClient(lambda: upstream.url, config.sidecar_engine_key)
    stack.callback(client.close)
    swaps = Swaps(swap, stack, upstream, storage, registry)
    attachment = _attachment(swaps, config, client, f"{socket.gethostname()}:{port}")
    scraper = _scraper(attachment, client, config, registry.engine)

    def ask_later() -> None:
        attachment.ask_again(REFUSED_SECONDS)

    def may_pass(path: str) -> bool:
        found = attachment.findings
        return passes(path, found.dialect if found else None, swap is not Swap.NONE, host not in LOOPBACK)

    observer = Observer(config, lambda: attachment.findings, attachment.served, attachment.keep, ask_later)
    for part in (attachment, scraper, observer):  # taken down the other way round: what was observed is written last
        stack.callback(part.close)
    attachment.start(scraper)
    scraper.start()
    return Sidecar(upstream, observer, Own(upstream, observer, attachment, scraper), may_pass)


def _attachment(swaps: Swaps, config: "SidecarConfig", client: "EngineClient", server_id: str) -> "Attachment":
    """What follows the drafter and keeps the feedback."""
    from service.engine.floor import FloorConfig
    from service.feedback import FeedbackConfig
    from service.hosts.lossy import Guard, LossyConfig
    from service.hosts.sidecar.attachment import Attachment
    from service.hosts.sidecar.following import Surroundings
    from service.live import LiveConfig

    around = Surroundings(
        settings(CommandConfig).drafter,
        server_id,
        swaps.registry,
        swaps.storage,
        settings(LiveConfig),
        settings(FeedbackConfig),
        settings(FloorConfig),
    )
    return Attachment(
        around,
        config,
        client,
        swaps.ready,
        Guard(settings(LossyConfig), known(swaps.swap)),
        kind=swaps.swap.value if swaps.swap is Swap.LLAMACPP else "",
        swaps=swaps.swap is not Swap.NONE,
    )


def _scraper(
    attachment: "Attachment", client: "EngineClient", config: "SidecarConfig", database: "Engine"
) -> "Scraper":
    """What reads the engine's counters, for the acceptance history where records carry no rounds."""
    from service.hosts.sidecar.counters import Growth
    from service.hosts.sidecar.history import row_of
    from service.hosts.sidecar.scraper import Scraper
    from storage.history import add

    def keep_growth(version: int, grown: Growth) -> None:
        drafter = attachment.drafter
        if drafter is not None and attachment.findings is not None and not attachment.counts_rounds:
            add(database, drafter.name, row_of(version, grown, attachment.guard.lossless))

    return Scraper(
        client, config.sidecar_scrape_seconds, lambda: attachment.served()[0], keep_growth, attachment.engine_restarted
    )


def _run(app: "Sidecar", listener: socket.socket, drain: int, url: str) -> None:
    """Serve until a signal; requests in flight get `drain` seconds."""
    import uvicorn

    host, port = listener.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port} stands before {url}; its own pages are under /redraft")
    if host not in LOOPBACK:
        warn("other machines can reach this sidecar: it asks nobody for a key that the engine does not ask for")
    warn_unknown()
    of_uvicorn: dict[str, Any] = {
        "log_config": None, "access_log": False, "server_header": False, "date_header": False, "ws": "none",
        "proxy_headers": False,  # they are for the engine
        "timeout_graceful_shutdown": drain,
    }  # fmt: skip
    uvicorn.Server(uvicorn.Config(app, **of_uvicorn)).run(sockets=[listener])
