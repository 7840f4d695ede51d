"""Logging, set up once a process: structlog and the standard library's loggers in one form.

Celery's and uvicorn's lines pass the same handler as ours, so a log file has one format. Text of requests
is never logged; the fields that could hold it are dropped here once more, and passwords in URLs are blotted.
"""

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from storage.config import read, setting

PRIVATE = frozenset({"prompt", "prompts", "text", "messages", "token_ids", "prompt_ids", "output_ids"})
PASSWORD = re.compile(r"(\w+://[^\s:/@]*):[^\s@/]+@")
# Celery says twice a second that it rang a bell; what goes wrong is logged as a warning or an error.
QUIET = (
    "httpx",
    "httpx2",
    "gguf.gguf_writer",
    "httpcore",
    "urllib3",
    "alembic",
    "filelock",
    "celery.beat",
    "celery.worker.strategy",
    "celery.app.trace",
)
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True)
class LogConfig:
    """How log lines look."""

    log: Literal["console", "json"] = setting("console", "log lines: `console` for people, `json` for machines")
    log_level: Level = setting("INFO", "least level that is logged: DEBUG, INFO, WARNING or ERROR")


def configure(config: LogConfig | None = None) -> None:
    """Send all log lines to stderr in the chosen form."""
    config = config or read(LogConfig, os.environ)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        without_private_fields,
        without_passwords,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_ending(config)))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.log_level)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars in log files
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _ending(config: LogConfig) -> list[Any]:
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if config.log == "json":
        return [drop, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [drop, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


def without_private_fields(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop fields that may hold what users wrote."""
    for name in PRIVATE & event.keys():
        del event[name]
    return event


def without_passwords(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blot the passwords of URLs in the line and its fields."""
    for name, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[name] = PASSWORD.sub(r"\1:***@", value)
    return event
