"""The drafter's side of an SGLang scheduler: whose tokens these are, and the feedback on its way to Redis.

A thread of its own does all that waits. Pushing weights is not done here: that is `redraft sidecar --swap sglang`.
"""

import os
from typing import Any

import structlog

from adapter.target import TargetConfig, fetch
from service.feedback import FeedbackConfig, FeedbackWriter
from service.hosts import lossy
from service.hosts.inside import InsideConfig, Looking, server_id
from service.lineage import choose
from service.origin import Origin
from storage.config import StorageConfig, read
from storage.database import open_database
from storage.records import FeedbackRecord
from storage.registry import Registry

THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")

log = structlog.get_logger()


class Attachment:
    """Looks for the drafter until there is one. `writes`: whether this process is the one that records."""

    def __init__(self, server_args: Any, writes: bool) -> None:
        self._args, self._writes = server_args, writes
        self._guard = lossy.Guard(read(lossy.LossyConfig, os.environ))
        self.origin: Origin | None = None
        self._writer: FeedbackWriter | None = None
        self._looking = Looking(self._attach, recorded="nothing")

    def start(self) -> None:
        if self._writes:
            self._looking.start()

    def put(self, record: FeedbackRecord) -> None:
        if self._writer is not None:
            self._writer.put(record)

    @property
    def lossless(self) -> bool:
        """The thresholds can be set while SGLang runs, so they are looked at for each record."""
        told = {name: getattr(self._args, name) for name in THRESHOLDS}
        self._guard.saw(lossy.sglang_server({**told, "SGLANG_SIMULATE_ACC_LEN": _simulated()}))
        return self._guard.lossless

    def _attach(self) -> None:
        config, storage = read(InsideConfig, os.environ), read(StorageConfig, os.environ)
        files = fetch(TargetConfig(target=self._args.model_path, cache=config.cache))
        registry = Registry(open_database(storage.sql_url))
        drafter = choose(registry, config.drafter, files.fingerprint, server_id("sglang"))
        self._writer = FeedbackWriter.of(storage, drafter.name, read(FeedbackConfig, os.environ))
        self.origin = Origin(files.fingerprint, files.tokenizer_fingerprint, drafter.name)
        log.info("drafter.attached", drafter=drafter.name)


def _simulated() -> float:
    """The acceptance length that SGLang makes up for benchmarks."""
    try:
        return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1"))
    except ValueError:
        return 1.0
