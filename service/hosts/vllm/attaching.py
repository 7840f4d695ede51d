"""The drafter's side of a vLLM process: found in the registry now or later, with its feedback and its live pointer.

A thread of its own does all that waits for anything: fingerprints, database, Redis, weights. A server may start
before there is a drafter, or while the database is away: it decodes plainly until one turns up.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
import torch

from adapter.drafters.learnt import LearntDrafter
from adapter.fingerprints import TargetFiles
from adapter.target import TargetConfig, fetch, load_embedding
from adapter.versions import Versions
from service.engine.floor import Broken
from service.feedback import FeedbackConfig, FeedbackWriter
from service.hosts.capabilities import check_kind, host_of
from service.hosts.inside import InsideConfig, Looking, server_id
from service.hosts.lossy import Guard
from service.lineage import choose
from service.live import LiveConfig, LiveFollower
from service.origin import Origin
from service.placing import Offer
from storage.capabilities import Capabilities
from storage.config import StorageConfig, read
from storage.database import open_database
from storage.registry import Drafter, Registry
from storage.servers import Servers
from storage.weights import WeightsStore

SOURCE = "vllm"

log = structlog.get_logger()


@dataclass(frozen=True)
class HostConfig(InsideConfig):
    """And of its engine."""

    fallback: str = "none"
    ngram_tokens: int = 262_144
    kv_memory: float = 4.0


@dataclass(frozen=True)
class Engine:
    """What the attachment must know of vLLM, and what it calls when the pointer moves."""

    model: str  # directory or hub name
    dtype: torch.dtype
    device: torch.device
    version: str
    guard: Guard  # whether its settings keep the target's text
    take: Callable[[Offer[LearntDrafter]], None]
    hold: Callable[[float], None]
    broken: Callable[[], Broken | None]


@dataclass(frozen=True)
class Attached:
    """One drafter at work in this process."""

    origin: Origin
    writer: FeedbackWriter
    follower: LiveFollower[LearntDrafter]


class Attachment:
    """Looks for the drafter until there is one, and then follows its live pointer."""

    def __init__(self, config: HostConfig, engine: Engine) -> None:
        """Raises `SettingError` for settings that cannot be used."""
        self._config, self._engine = config, engine
        self._storage = read(StorageConfig, os.environ)
        self._live, self._feedback = read(LiveConfig, os.environ), read(FeedbackConfig, os.environ)
        self.attached: Attached | None = None
        self._files: TargetFiles | None = None
        self._registry: Registry | None = None
        self.looking = Looking(self._attach, decoding="plain")

    def start(self) -> None:
        self.looking.start()

    def close(self) -> None:
        """Sign off, and write what feedback is left."""
        self.looking.close()
        if self.attached is not None:
            self.attached.follower.close()
            self.attached.writer.close()

    def _attach(self) -> None:
        files = self._files = self._files or fetch(TargetConfig(target=self._engine.model, cache=self._config.cache))
        registry = self._registry = self._registry or Registry(open_database(self._storage.sql_url))
        drafter = choose(registry, self._config.drafter, files.fingerprint, server_id(SOURCE))
        check_kind(SOURCE, drafter.kind)
        follower = self._follower(registry, drafter, files)
        writer = FeedbackWriter.of(self._storage, drafter.name, self._feedback)
        origin = Origin(files.fingerprint, files.tokenizer_fingerprint, drafter.name)
        self.attached = Attached(origin, writer, follower)
        follower.start()
        log.info("drafter.attached", drafter=drafter.name, kind=drafter.kind)

    def _follower(self, registry: Registry, drafter: Drafter, files: TargetFiles) -> LiveFollower[LearntDrafter]:
        engine = self._engine
        embedding = load_embedding(files).to(dtype=engine.dtype, device=engine.device)
        versions = Versions(WeightsStore(self._storage.weights_folder), files, embedding)
        return LiveFollower(
            drafter.name,
            server_id(SOURCE),
            SOURCE,
            registry,
            Servers(registry.engine),
            lambda version: versions.load(version, drafter),
            engine.take,
            self._storage.stream_url,
            self._live,
            engine.hold,
            engine.broken,
            target_fingerprint=files.fingerprint,
            capabilities=lambda: found(engine),
        )


def found(engine: Engine) -> Capabilities:
    """What this vLLM shows of itself."""
    return engine.guard.applied(replace(host_of(SOURCE).capabilities, engine=f"vllm {engine.version}"))
