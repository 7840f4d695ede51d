"""A drafter whose versions the engine behind a sidecar serves: which one proposes, how it is swapped, when it is taken
back. Between the follower of the live pointer and the engine's own way to take a version.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from service.engine.floor import Broken, Floor, FloorConfig, Proposed
from service.engine.survival import RowClass
from service.feedback import FeedbackConfig
from service.hosts.capabilities import Capabilities
from service.hosts.sidecar.scraper import Scraper
from service.hosts.swapping import SwapFailed
from service.live import LiveConfig, LiveFollower
from service.placing import Offer
from storage.config import StorageConfig
from storage.records import FeedbackRecord
from storage.registry import Drafter, Registry, Version
from storage.servers import Servers

Load = Callable[[Version], Path]  # a version's files, written where they are missing
Swapping = Callable[[Version, Path], None]  # raises SwapFailed
MadeReady = Callable[[Drafter], tuple[Load, Swapping]]

log = structlog.get_logger()


@dataclass(frozen=True)
class Surroundings:
    """Whose sidecar this is, and where its records and versions are."""

    drafter: str  # name; empty: the only general one
    server_id: str
    registry: Registry
    storage: StorageConfig
    live: LiveConfig
    feedback: FeedbackConfig
    floor: FloorConfig


class Fixed:
    """An engine whose drafter nobody changes: `--swap none`."""

    def __init__(self) -> None:
        self._served: Version | None = None

    def load(self, version: Version) -> Path:
        return Path()

    def swap(self, version: Version, checkpoint: Path) -> None:
        """The first version is taken to be what the engine was started with."""
        if self._served is not None and version.id != self._served.id:
            number = self._served.number
            raise SwapFailed(
                f"this sidecar swaps nothing, and takes its engine to serve version {number}: export version "
                f"{version.number} (redraft export), start engine and sidecar again, or start it with --swap"
            )
        self._served = version


class Following:
    """One engine's following of one drafter. `scraper` is read around each swap."""

    def __init__(
        self,
        drafter: Drafter,
        host: str,
        around: Surroundings,
        ready: tuple[Load, Swapping],
        capabilities: Callable[[], Capabilities | None],
        scraper: Scraper | None,
    ) -> None:
        load, self._swap = ready
        self._scraper = scraper
        self._floor, self._judging = Floor(around.floor), threading.Lock()
        self._swapping = threading.Lock()
        self._offered: Offer[Path] | None = None  # what the engine serves
        self._serving: int | None = None  # version; None: nobody knows
        self._moves = 0  # beginnings and ends of swaps
        self.follower = LiveFollower(
            drafter.name,
            around.server_id,
            host,
            around.registry,
            Servers(around.registry.engine),
            load,
            self._offer,
            around.storage.stream_url,
            around.live,
            broken=self._broken,
            target_fingerprint=drafter.target_fingerprint,
            capabilities=capabilities,
        )

    @property
    def served(self) -> tuple[int | None, int]:
        """The version that proposes, where it is known; and a number that is odd during a swap."""
        return self._serving, self._moves

    def judge(self, record: FeedbackRecord) -> None:
        """Show the floor under a new version what a request's rounds came to."""
        if not record.lossless:
            return
        row_class = RowClass(record.workload, record.policy)
        with self._judging:
            for r in record.rounds:
                self._floor.note([Proposed(record.request_id, row_class, r.version, r.proposed, r.accepted)])

    def engine_restarted(self) -> None:
        """It serves what it was started with, until it is given its version again."""
        self._serving = None

    def serve_again(self) -> None:
        """Give a restarted engine its version again; nothing where it has it. Raises `SwapFailed`."""
        offered = self._offered
        if self._serving is None and offered is not None:
            self._give(offered)
            log.info("sidecar.served_again", version=offered.version.number)

    def _offer(self, offered: Offer[Path]) -> None:
        if offered.canary:
            raise SwapFailed(
                f"one engine cannot serve the canary version {offered.version.number} beside the live one: promote it"
            )
        self._give(offered)

    def _give(self, offered: Offer[Path]) -> None:
        """What is counted or answered meanwhile belongs to no version."""
        with self._swapping:
            if self._scraper is not None:
                self._scraper.look()
            self._moves += 1
            try:
                self._swap(offered.version, offered.drafter)
                self._judge_from_now_on(offered)
                self._offered, self._serving = offered, offered.version.number
            finally:
                self._moves += 1
                if self._scraper is not None:
                    self._scraper.forget()

    def _judge_from_now_on(self, offered: Offer[Path]) -> None:
        """A new version is under the floor; one that is only given again is under it as it was."""
        if self._offered is offered:
            return
        before = self._offered.version.number if self._offered is not None else 0
        with self._judging:
            self._floor.swapped(offered.version.number, before, offered.guarded)

    def _broken(self) -> Broken | None:
        with self._judging:
            return self._floor.broken
