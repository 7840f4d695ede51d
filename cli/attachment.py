"""The drafter's side of a server: its feedback and its following of the live pointer.

A server may start before there is a drafter (or while the database is away for a while): it decodes plainly
then, and this attaches the drafter when it turns up. Nothing here is ever waited for by a request.
"""

import threading
from dataclasses import dataclass

import structlog
import torch
from sqlalchemy.exc import SQLAlchemyError

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from adapter.versions import Versions
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.memory import MemoryBound
from service.feedback import FeedbackConfig, FeedbackWriter
from service.live import LiveConfig, LiveFollower, Offer
from service.metrics import Metrics
from service.recording import SOURCE, Origin, record_of
from storage.config import StorageConfig
from storage.registry import Drafter, Registry, UnknownDrafter, Version
from storage.servers import Servers
from storage.weights import WeightsStore

LOOK_SECONDS = 2.0
SWAP_SECONDS = 60.0
WARM_UP_TOKENS = 8

log = structlog.get_logger()


@dataclass(frozen=True)
class Attached:
    """One drafter at work in this server."""

    drafter: Drafter
    origin: Origin
    writer: FeedbackWriter
    follower: LiveFollower[CausalLM]


class Attachment:
    """Finds the drafter, now or later, and connects engine, feedback and live pointer to it."""

    def __init__(
        self,
        name: str,
        server_id: str,
        target: Target,
        registry: Registry,
        storage: StorageConfig,
        live: LiveConfig,
        feedback: FeedbackConfig,
        metrics: Metrics,
    ) -> None:
        """`name` is the drafter's, or empty for the only one of the target."""
        self._name, self._server_id, self._target = name, server_id, target
        self._registry, self._storage = registry, storage
        self._live, self._feedback, self._metrics = live, feedback, metrics
        self._versions = Versions(WeightsStore(storage.weights_folder), target.files, target.embedding)
        self._attached: Attached | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def drafter(self) -> str:
        """The drafter's name; where there is none yet, the one that was asked for, which may be empty."""
        return self._attached.drafter.name if self._attached else self._name

    def finished(self, generation: Generation) -> None:
        """Count a finished request and write its feedback; called by the engine, never raises."""
        try:
            self._metrics.finished(generation)
            attached = self._attached
            if attached and generation.output_ids and generation.finish_reason != "error":
                attached.writer.put(record_of(generation, attached.origin))
        except Exception:
            log.exception("feedback.failed", request_id=generation.request_id)

    def start(self, engine: Engine) -> None:
        """Attach the drafter; where there is none yet, look for it now and then. Raises `WrongDrafter`."""
        if not self._attach(engine):
            self._thread = threading.Thread(target=self._look, args=(engine,), name="attach", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the live version proposes, but no longer than that; not at all where there is no drafter."""
        if self._attached is not None:
            follower, pause = self._attached.follower, threading.Event()
            for _ in range(round(seconds / 0.05)):
                if follower.generation or follower.error:
                    return
                pause.wait(0.05)

    def close(self) -> None:
        """Sign off, and write what feedback is left."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._attached is not None:
            self._attached.follower.close()
            self._attached.writer.close()

    def _look(self, engine: Engine) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            try:
                if self._attach(engine):
                    return
            except (SQLAlchemyError, ValueError) as error:  # no database, or a drafter that does not fit
                log.warning("drafter.not_attached", error=type(error).__name__)

    def _attach(self, engine: Engine) -> bool:
        """False where there is no drafter, or none was chosen among several."""
        files = self._target.files
        try:
            drafter = self._registry.choose(self._name, files.fingerprint)
        except UnknownDrafter as none:
            if self._thread is None:
                log.warning("drafter.none", reason=str(none), decoding="plain")
            return False
        origin = Origin(files.fingerprint, files.tokenizer_fingerprint, drafter.name)
        writer = self._writer(drafter)
        follower = self._follower(drafter, engine)
        self._attached = Attached(drafter, origin, writer, follower)
        self._metrics.watch(engine, writer, follower)
        follower.start()
        log.info("drafter.attached", drafter=drafter.name)
        return True

    def _writer(self, drafter: Drafter) -> FeedbackWriter:
        storage = self._storage
        return FeedbackWriter(
            storage.stream_url, drafter.name, storage.stream_length, storage.retention_hours, self._feedback
        )

    def _follower(self, drafter: Drafter, engine: Engine) -> LiveFollower[CausalLM]:
        def load(version: Version) -> CausalLM:
            return warmed_up(self._versions.load(version, drafter))

        def release() -> None:
            engine.release().result(SWAP_SECONDS)

        return LiveFollower(
            drafter.name,
            self._server_id,
            SOURCE,
            self._registry,
            Servers(self._registry.engine),
            load,
            lambda offered: take(engine, offered),
            self._storage.stream_url,
            self._live,
            release,
            lambda: engine.floor.broken,
        )


def take(engine: Engine, offered: Offer[CausalLM]) -> None:
    """Swap; where there is no memory for two drafters, the new one serves every request."""
    number, drafter = offered.version.number, offered.drafter
    try:
        swapped = engine.swap(number, drafter, offered.holdback, offered.guarded)
    except MemoryBound as full:
        if offered.holdback == 0.0:
            raise
        log.warning("live.no_holdback", version=number, reason=str(full))
        swapped = engine.swap(number, drafter, guarded=offered.guarded)
    swapped.result(SWAP_SECONDS)


@torch.inference_mode()
def warmed_up(drafter: CausalLM) -> CausalLM:
    """The drafter after one pass, so that its first round in service is not its first ever."""
    tokens = torch.zeros(1, WARM_UP_TOKENS, dtype=torch.long, device=drafter.head.weight.device)
    drafter.logits(drafter.hidden(tokens))
    return drafter
