"""The drafter's side of an SGLang scheduler: whose tokens these are, and the feedback on its way to Redis.

A thread of its own does all that waits. Pushing weights is not done here: that is `redraft sidecar --swap sglang`.
"""

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from adapter.target import TargetConfig, fetch
from service.feedback import FeedbackConfig, FeedbackWriter
from service.hosts import lossy
from service.lineage import choose
from service.recording import Origin
from storage.config import StorageConfig, read
from storage.database import open_database
from storage.records import FeedbackRecord
from storage.registry import Registry, UnknownDrafter

LOOK_SECONDS = 2.0
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")

log = structlog.get_logger()


@dataclass(frozen=True)
class HostConfig:
    """Settings of redraft's own server that mean the same here; the README has them all."""

    drafter: str = ""
    cache: Path = Path("~/.cache/redraft")


class Attachment:
    """Looks for the drafter until there is one. `writes`: whether this process is the one that records."""

    def __init__(self, server_args: Any, writes: bool) -> None:
        self._args, self._writes = server_args, writes
        self._guard = lossy.Guard(read(lossy.LossyConfig, os.environ))
        self.origin: Origin | None = None
        self._writer: FeedbackWriter | None = None
        self._thread = threading.Thread(target=self._run, name="redraft-attach", daemon=True)
        self._closing = threading.Event()

    def start(self) -> None:
        if self._writes:
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._writer is not None:
            self._writer.close()

    def put(self, record: FeedbackRecord) -> None:
        if self._writer is not None:
            self._writer.put(record)

    @property
    def lossless(self) -> bool:
        """The thresholds can be set while SGLang runs, so they are looked at for each record."""
        told = {name: getattr(self._args, name) for name in THRESHOLDS}
        self._guard.saw(lossy.sglang_server({**told, "SGLANG_SIMULATE_ACC_LEN": _simulated()}))
        return self._guard.lossless

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._attach()
                return
            except (UnknownDrafter, SQLAlchemyError, ValueError, OSError) as error:
                log.warning("drafter.none", reason=f"{type(error).__name__}: {error}", recorded="nothing")
            self._closing.wait(LOOK_SECONDS)

    def _attach(self) -> None:
        config, storage = read(HostConfig, os.environ), read(StorageConfig, os.environ)
        files = fetch(TargetConfig(target=self._args.model_path, cache=config.cache))
        registry = Registry(open_database(storage.sql_url))
        drafter = choose(registry, config.drafter, files.fingerprint, f"{socket.gethostname()}:sglang-{os.getpid()}")
        self._writer = FeedbackWriter.of(storage, drafter.name, read(FeedbackConfig, os.environ))
        self.origin = Origin(files.fingerprint, files.tokenizer_fingerprint, drafter.name)
        log.info("drafter.attached", drafter=drafter.name)


def _simulated() -> float:
    """The acceptance length that SGLang makes up for benchmarks."""
    try:
        return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1"))
    except ValueError:
        return 1.0
