"""The drafters' side of a server: for each lane its feedback and its following of the live pointer.

The default lane has the drafter of REDRAFT_DRAFTER, or the only general one; each drafter that a route names has a
lane of its own, attached and detached as the routes change. A server may start before there is a drafter (or while
the database is away for a while): it decodes plainly then, and this attaches the drafter when it turns up. Nothing
here is ever waited for by a request.
"""

import threading
import time
from dataclasses import dataclass, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from adapter.drafters.learnt import LearntDrafter
from adapter.target import Target
from adapter.versions import Versions
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.memory import MemoryBound
from service.engine.residents import DEFAULT
from service.feedback import FeedbackConfig, FeedbackWriter
from service.hosts.capabilities import host_of
from service.lineage import choose
from service.live import BEAT_SECONDS, LiveConfig, LiveFollower, sign_off
from service.metrics import Metrics
from service.origin import Origin
from service.placing import Offer
from service.recording import SOURCE, record_of
from storage.announcements import Announcements
from storage.capabilities import Capabilities
from storage.config import StorageConfig
from storage.registry import Drafter, Registry, UnknownDrafter, Version, WrongDrafter
from storage.routes import Routes
from storage.servers import Servers
from storage.weights import WeightsStore

LOOK_SECONDS = 2.0
SWAP_SECONDS = 60.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Attached:
    """One drafter at work in this server."""

    drafter: Drafter
    origin: Origin
    writer: FeedbackWriter
    follower: LiveFollower[LearntDrafter]

    def close(self) -> None:
        """Sign off, and write what feedback is left."""
        self.follower.close()
        self.writer.close()


class Attachment:
    """Finds the drafters, now or later, and connects engine, feedback and live pointers to them."""

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
        routed: bool = True,
    ) -> None:
        """`name` is the default drafter's, or empty for the only general one of the target.

        Where it is not `routed` (REDRAFT_ROUTING=off), the default drafter proposes for every workload.
        """
        self._name, self._server_id, self._target = name, server_id, target
        self._registry, self._storage = registry, storage
        self._live, self._feedback, self._metrics = live, feedback, metrics
        self._versions = Versions(WeightsStore(storage.weights_folder), target.files, target.embedding)
        self._routes, self._routing = Routes(registry.engine), routed
        self._routed = -1  # generation of the routes that the engine has
        self._lanes: dict[str, Attached] = {}
        self._told = ""  # why there is no default drafter
        self._beat_at = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def drafter(self) -> str:
        """The default drafter's name; where there is none yet, the one that was asked for, which may be empty."""
        attached = self._lanes.get(DEFAULT)
        return attached.drafter.name if attached else self._name

    def finished(self, generation: Generation) -> None:
        """Count a finished request and write its feedback; called by the engine, never raises."""
        try:
            attached = self._lanes.get(generation.lane)
            self._metrics.finished(generation, attached.drafter.name if attached else "")
            if attached and generation.output_ids and generation.finish_reason != "error":
                attached.writer.put(record_of(generation, attached.origin))
        except Exception:
            log.exception("feedback.failed", request_id=generation.request_id)

    def start(self, engine: Engine) -> None:
        """Attach the drafters, and keep looking for others."""
        self._metrics.watch(engine)
        self._look(engine)
        self._thread = threading.Thread(target=self._run, args=(engine,), name="attach", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the live versions propose, but no longer than that; not at all where there is no drafter."""
        followers, pause = [attached.follower for attached in self._lanes.values()], threading.Event()
        for _ in range(round(seconds / 0.05)):
            if all(follower.generation or follower.error for follower in followers):
                return
            pause.wait(0.05)

    def close(self) -> None:
        """Sign off, and write what feedback is left."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        for attached in self._lanes.values():
            attached.close()
        if DEFAULT not in self._lanes:
            sign_off(Servers(self._registry.engine), self._server_id)

    def _run(self, engine: Engine) -> None:
        heard = Announcements(self._storage.stream_url, target=self._target.files.fingerprint)
        while not self._closing.is_set():
            poll = self._live.live_poll_seconds if DEFAULT in self._lanes else LOOK_SECONDS
            heard.listen(poll, self._closing.is_set)
            if not self._closing.is_set():
                self._look(engine)
        heard.close()

    def _look(self, engine: Engine) -> None:
        """For the default drafter where there is none yet, and for a change of the routes."""
        try:
            if DEFAULT not in self._lanes:
                if self._attach_default(engine):
                    self._routed = -1  # it may have been a lane of its own
                else:
                    self._beat_plain()
            self._follow_routes(engine)
        except (SQLAlchemyError, ValueError) as error:  # no database, or a drafter that does not fit
            log.warning("drafter.not_attached", error=type(error).__name__)

    def _attach_default(self, engine: Engine) -> bool:
        """False where there is no drafter, none was chosen among several, or the one asked for is another target's."""
        try:
            drafter = choose(self._registry, self._name, self._target.files.fingerprint, self._server_id)
        except (UnknownDrafter, WrongDrafter) as none:
            if self._told != str(none):
                log.warning("drafter.none", reason=str(none), decoding="plain")
            self._told = str(none)
            return False
        self._attach(engine, drafter, DEFAULT)
        return True

    def _beat_plain(self) -> None:
        """Say that this server lives, though it follows no drafter."""
        if time.monotonic() >= self._beat_at:
            Servers(self._registry.engine).beat(
                self._server_id, SOURCE, "", 0, 0, f"decodes plainly: {self._told}",
                self._target.files.fingerprint, self._capabilities(),
            )  # fmt: skip
            self._beat_at = time.monotonic() + BEAT_SECONDS

    def _capabilities(self) -> Capabilities:
        return replace(host_of(SOURCE).capabilities, engine="redraft", losslessness="lossless")

    def _follow_routes(self, engine: Engine) -> None:
        """Give each drafter that a route names a lane, and take the lanes away that no route leads to any more."""
        generation = self._routes.generation(self._target.files.fingerprint)
        if generation != self._routed:
            wanted = self._wanted()
            for name in sorted(set(wanted.values()) - self._lanes.keys()):
                self._attach_routed(engine, name)
            engine.lanes.route(wanted)
            self._routed = generation
        for lane in self._lanes.keys() - engine.lanes_in_use() - {DEFAULT}:
            self._detach(engine, lane)

    def _wanted(self) -> dict[str, str]:
        """The lane of each workload that does not go to the default drafter."""
        if not self._routing:
            return {}
        routes = self._routes.of(self._target.files.fingerprint)
        return {route.workload: route.drafter for route in routes if route.drafter not in ("", self.drafter)}

    def _attach_routed(self, engine: Engine, name: str) -> None:
        try:
            self._attach(engine, self._registry.choose(name, self._target.files.fingerprint), name)
        except (UnknownDrafter, ValueError) as refused:  # retired meanwhile: its workloads go to the default one
            log.warning("drafter.not_attached", drafter=name, reason=str(refused))

    def _attach(self, engine: Engine, drafter: Drafter, lane: str) -> None:
        files = self._target.files
        origin = Origin(files.fingerprint, files.tokenizer_fingerprint, drafter.name)
        writer = FeedbackWriter.of(self._storage, drafter.name, self._feedback)
        attached = Attached(drafter, origin, writer, self._follower(drafter, engine, lane))
        self._lanes[lane] = attached
        self._metrics.follow(lane, attached.writer, attached.follower)
        attached.follower.start()
        log.info("drafter.attached", drafter=drafter.name, lane=lane)

    def _detach(self, engine: Engine, lane: str) -> None:
        attached = self._lanes.pop(lane)
        self._metrics.unfollow(lane)
        attached.close()
        engine.swap(0, None, lane=lane).result(SWAP_SECONDS)
        log.info("drafter.detached", drafter=attached.drafter.name)

    def _follower(self, drafter: Drafter, engine: Engine, lane: str) -> LiveFollower[LearntDrafter]:
        def load(version: Version) -> LearntDrafter:
            return self._versions.load(version, drafter)

        return LiveFollower(
            drafter.name,
            self._server_id if lane == DEFAULT else f"{self._server_id}/{lane}",
            SOURCE,
            self._registry,
            Servers(self._registry.engine),
            load,
            lambda offered: take(engine, offered, lane),
            self._storage.stream_url,
            self._live,
            lambda share: hold(engine, share, lane),
            lambda: engine.lanes.broken(lane),
            self._target.files.fingerprint,
            self._capabilities,
        )


def take(engine: Engine, offered: Offer[LearntDrafter], lane: str = DEFAULT) -> None:
    """Swap; where there is no memory for two drafters, a promoted one serves every request."""
    number, drafter = offered.version.number, offered.drafter
    try:
        swapped = engine.swap(number, drafter, offered.holdback, offered.guarded, lane)
    except MemoryBound as full:
        if offered.holdback == 0.0 or offered.canary:
            raise
        log.warning("live.no_holdback", version=number, reason=str(full))
        swapped = engine.swap(number, drafter, guarded=offered.guarded, lane=lane)
    swapped.result(SWAP_SECONDS)


def hold(engine: Engine, share: float, lane: str = DEFAULT) -> None:
    """Leave that share of the requests on the drafter that was offered before."""
    engine.lanes.hold(share, lane).result(SWAP_SECONDS)
