import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine

from service.hosts.vllm_push import VllmPush, VllmPushConfig
from storage.database import open_database
from storage.pushes import Pushes
from storage.registry import Registry, Version
from storage.weights import WeightsStore
from tests.service.hosts.vllm_push.vllm_like import VllmLike, write
from tests.storage.rows import make_candidate, make_drafter

START, FIRST, SECOND = 7, 1, 2  # seeds: what the engine started with, and two versions
QUICK = VllmPushConfig(push_seconds=5)


@dataclass
class PushRig:
    """An engine, a registry with two versions of a drafter, their checkpoints, and the rows of pushes."""

    vllm: VllmLike
    database: Engine
    folder: Path
    versions: tuple[Version, Version]

    def __post_init__(self) -> None:
        self.pushes = Pushes(self.database)
        self.opened: list[VllmPush] = []

    def push(self, config: VllmPushConfig = QUICK) -> VllmPush:
        made = VllmPush(self.vllm.url, self.pushes, self.folder / "staging", config)
        self.opened.append(made)
        return made

    def checkpoint(self, number: int) -> Path:
        return write(self.folder / f"version-{number}", seed=number)

    def swap(self, number: int, push: VllmPush | None = None) -> None:
        (push or self.push()).swap(self.versions[number - 1], self.checkpoint(number))

    def states(self) -> list[str]:
        """The oldest first."""
        return [step.state for step in reversed(self.pushes.steps(self.vllm.url))]

    def close(self) -> None:
        for push in self.opened:
            push.close()
        self.vllm.close()
        self.database.dispose()


@pytest.fixture
def rig(sqlite_template: Path, tmp_path: Path) -> Iterator[PushRig]:
    shutil.copy(sqlite_template, tmp_path / "redraft.db")
    database = open_database(f"sqlite:///{tmp_path / 'redraft.db'}")
    registry, store = Registry(database), WeightsStore(tmp_path / "weights")
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "record")
    made = PushRig(VllmLike(write(tmp_path / "start", START)), database, tmp_path, (first, second))
    yield made
    made.close()
