"""A server's surroundings for the tests of the live follower: real registry, noted swaps. One database is enough
here: `tests/storage` holds SQLite and PostgreSQL to the same behaviour.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Self

from sqlalchemy import Engine

from service.engine.floor import Broken
from service.live import LiveConfig, LiveFollower
from service.placing import Offer
from storage.database import open_database
from storage.registry import Registry, Version
from storage.servers import Server, Servers
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter

NOWHERE = "unix:///nobody/listens.sock"
SLOW, FAST = LiveConfig(live_poll_seconds=3_600), LiveConfig(live_poll_seconds=0.05)


@dataclass
class Rig:
    """A registry with a drafter's versions, and a server around a stand-in for the engine that takes notes."""

    engine: Engine
    folder: Path
    versions: list[Version] = field(default_factory=list)  # version n at index n - 1
    loaded: list[int] = field(default_factory=list)
    swapped: list[tuple[int, str]] = field(default_factory=list)  # generation, drafter
    offers: list[Offer[str]] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # shares that were left on the drafter before
    broken: Broken | None = None  # what the engine went back from
    damaged: set[int] = field(default_factory=set)
    followers: list[LiveFollower[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry, self.servers = Registry(self.engine), Servers(self.engine)
        self.versions.append(make_drafter(self.registry))
        for number in range(2, 6):
            store = WeightsStore(self.folder / "weights")
            self.versions.append(make_candidate(self.registry, store, self.versions[0], f"record-{number}"))

    @classmethod
    def of(cls, template: Path, folder: Path) -> Self:
        """On a copy of a migrated SQLite database."""
        copy(template, folder / "redraft.db")
        return cls(open_database(f"sqlite:///{folder / 'redraft.db'}"), folder)

    def close(self) -> None:
        for follower in self.followers:
            if follower.running:
                follower.close()
        self.engine.dispose()

    def follower(self, url: str = NOWHERE, config: LiveConfig = FAST) -> LiveFollower[str]:
        follower = LiveFollower(
            "chat", "server-1", "reference", self.registry, self.servers, self.load, self._offered, url, config,
            self.held.append, lambda: self.broken,
        )  # fmt: skip
        self.followers.append(follower)
        return follower

    def load(self, version: Version) -> str:
        self.loaded.append(version.number)
        if version.number in self.damaged:
            raise ValueError("the file is damaged")
        return f"drafter {version.number}"

    def _offered(self, offer: Offer[str]) -> None:
        self.swap(offer.generation, offer.version, offer.drafter)
        self.offers.append(offer)

    def swap(self, generation: int, version: Version, drafter: str) -> None:
        self.swapped.append((generation, drafter))

    def promote(self, number: int, holdback: float = 0.0) -> int:
        """The new generation."""
        live = self.registry.live("chat")
        return self.registry.promote(self.versions[number - 1], live, "test", "because", holdback).generation

    def rollback(self) -> int:
        return self.registry.rollback("chat", None, "test", "because").generation

    def server(self) -> Server:
        (server,) = self.servers.live("chat")
        return server

    def acknowledged(self, generation: int) -> Callable[[], bool]:
        return lambda: [s.generation for s in self.servers.live("chat")] == [generation]


class Clock:
    """Stands for `time` in `service.live`: it passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now
