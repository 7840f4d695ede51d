"""Keeps a server on its drafter's live version: follows the pointer, loads, offers the swap, acknowledges.

pointer moves (SQL) -> announcement (Redis) or polling -> load beside the running drafter -> the engine swaps
between rounds -> `Servers.beat` with the new generation, which is what `redraft rollback` waits for. Whatever
fails here, the engine goes on with what it has.

While the watch after a promotion is open, the version before stays for a share of the requests; while a canary is
out, the live one keeps all but the canary's share. Where the engine found the new version below the floor it has gone
back already: here the pointer is moved after it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import structlog

from service.engine.floor import Broken
from service.placing import D, Offer, Placing
from storage.announcements import Announcements
from storage.capabilities import Capabilities
from storage.config import setting
from storage.registry import Pointer, Registry, Version
from storage.servers import Servers

BEAT_SECONDS = 5.0  # a server unheard of for 15 s counts as gone
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0

log = structlog.get_logger()


@dataclass(frozen=True)
class LiveConfig:
    """How a server follows the live pointer."""

    live_poll_seconds: float = setting(2.0, "how often a server looks for a new live version by itself")


class LiveFollower(Generic[D]):
    """One server's follower of one drafter.

    `load(version)` returns a checked drafter, or raises. `offer` returns when the engine has swapped, or raises;
    `hold(share)` leaves that share of the requests on the drafter offered before (0.0: it goes; 1.0: the engine goes
    back to it); `broken` says what the engine went back from by itself. All run in the follower's thread, never in
    the engine's.
    """

    def __init__(
        self,
        drafter: str,
        server_id: str,
        host_kind: str,
        registry: Registry,
        servers: Servers,
        load: Callable[[Version], D],
        offer: Callable[[Offer[D]], None],
        redis_url: str,
        config: LiveConfig = LiveConfig(),
        hold: Callable[[float], None] = lambda share: None,
        broken: Callable[[], Broken | None] = lambda: None,
        target_fingerprint: str = "",
        capabilities: Callable[[], Capabilities | None] = lambda: None,
    ) -> None:
        """`capabilities` says what the host found of itself; it is asked at each beat, and stored with it."""
        self.drafter, self.server_id, self.host_kind = drafter, server_id, host_kind
        self.registry, self.servers = registry, servers
        self.config = config
        self._target_fingerprint, self._capabilities = target_fingerprint, capabilities
        self.generation = 0  # applied by this server; 0: none yet
        self.error = ""  # why the newest generation is not applied
        self.failures = 0
        self._placing = Placing(load, offer, hold, broken)
        self._retry = _Retry()
        self._said = 0  # the generation whose version was reported as broken
        self._say_at = 0.0
        self._beat_at = 0.0
        self.registry_reachable = True
        self._announcements = Announcements(redis_url, drafter)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def version(self) -> Version | None:
        """Served by this server: to all requests, or to all but the share of a canary or of the version before."""
        return self._placing.version

    @property
    def swaps(self) -> int:
        return self._placing.swaps

    @property
    def connected(self) -> bool:
        """Whether announcements are heard; without them, polling finds each move."""
        return self._announcements.connected

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop following and sign off, so that nobody waits for this server's acknowledgement."""
        self._closing.set()
        self._thread.join(timeout)
        sign_off(self.servers, self.server_id)

    def follow_once(self) -> None:
        """Look at the pointer; when it moved, load, swap and acknowledge; else beat when it is time."""
        self._take_back()
        pointer = self.registry.pointer(self.drafter)
        if pointer.generation != self.generation and self._retry.due(pointer.generation):
            self._apply(pointer)
            self._beat()
        elif self._placing.let_go(pointer):
            log.info("live.holdback_ended", drafter=self.drafter, version=pointer.live.number)
        elif time.monotonic() >= self._beat_at:
            self._beat()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._follow_safely()
            self._wait()
        self._announcements.close()

    def _follow_safely(self) -> None:
        """One look; the database may be away for as long as it likes."""
        try:
            self.follow_once()
        except Exception as error:
            if self.registry_reachable:
                log.warning("live.registry_unreachable", error=type(error).__name__)
            self.registry_reachable = False
            return
        if not self.registry_reachable:
            log.info("live.registry_reachable")
        self.registry_reachable = True

    def _wait(self) -> None:
        """Until an announcement, the next poll, or the end."""
        self._announcements.listen(
            self.config.live_poll_seconds, lambda: self._closing.is_set() or self._unsaid() is not None
        )

    def _unsaid(self) -> Broken | None:
        """What the engine went back from and the registry does not know yet, when it is time to say so."""
        due = self._said != self.generation and time.monotonic() >= self._say_at
        return self._placing.broken() if due else None

    def _take_back(self) -> None:
        """Move the pointer back from a version that is below the floor; another server may have done it already."""
        found, newest = self._unsaid(), self._placing.newest
        if found is None or newest is None:
            return
        self._say_at = time.monotonic() + self.config.live_poll_seconds  # the database may be away
        self.registry.take_back(newest, f"server:{self.server_id}", found.reason)
        self._said = self.generation
        log.warning("live.taken_back", version=found.version, reason=found.reason)

    def _apply(self, pointer: Pointer) -> None:
        began = time.monotonic()
        try:
            self._placing.apply(pointer)
        except Exception as error:  # a damaged file, too little memory, the engine's refusal: the old one stays
            self._failed(pointer, error)
            return
        self.generation, self.error = pointer.generation, ""
        self._retry = _Retry()
        milliseconds = round((time.monotonic() - began) * 1000)
        log.info("live.applied", version=pointer.live.number, generation=self.generation, milliseconds=milliseconds)

    def _failed(self, pointer: Pointer, error: Exception) -> None:
        self.failures += 1
        self.error = f"version {pointer.live.number}: {error}"
        self._retry.failed(pointer.generation)
        log.warning("live.swap_failed", version=pointer.live.number, error=type(error).__name__)

    def _beat(self) -> None:
        """Say what this server serves: at once after a change, else every few seconds."""
        number = self.version.number if self.version else 0
        self.servers.beat(
            self.server_id,
            self.host_kind,
            self.drafter,
            self.generation,
            number,
            self.error,
            self._target_fingerprint,
            self._capabilities(),
        )
        self._beat_at = time.monotonic() + BEAT_SECONDS


def sign_off(servers: Servers, server_id: str) -> None:
    """Nobody need wait for this server any more."""
    try:
        servers.gone(server_id)
    except Exception as error:  # it will be missed after 15 s all the same
        log.warning("live.sign_off_failed", error=type(error).__name__)


class _Retry:
    """When to try a generation again that could not be applied; another generation is tried at once."""

    def __init__(self) -> None:
        self._generation, self._failures, self._at = 0, 0, 0.0

    def due(self, generation: int) -> bool:
        return generation != self._generation or time.monotonic() >= self._at

    def failed(self, generation: int) -> None:
        self._failures = self._failures + 1 if generation == self._generation else 1
        self._generation = generation
        self._at = time.monotonic() + min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(self._failures - 1, 10))
