"""The learning side around one drafter, in this process: housekeeper, stream, windows, pipeline and registry.

Everything is what a deployment runs, but for Celery: the job that the housekeeper's sweep makes is done at once.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adapter.drafters.learnt import LearntDrafter
from adapter.drift import DriftConfig
from adapter.versions import Versions
from benchmarks.experiment import Experiment
from benchmarks.first import register
from storage.config import StorageConfig
from storage.database import migrate, open_database
from storage.decisions import TrainingReport
from storage.jobs import Jobs
from storage.records import FeedbackRecord, encode
from storage.redis_clients import consume
from storage.registry import Registry, Version
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from worker.housekeeping import Housekeeper
from worker.pipeline import AdaptConfig, Stores, adapt_once

LEASE_SECONDS = 3600.0  # nobody else is there to take a job over


@dataclass(frozen=True)
class Update:
    """One window and what became of it."""

    cause: str  # size, age or drift
    records: int  # of its training part
    outcome: str  # promoted, refused or failed
    reason: str
    version: int | None  # that was made
    training_seconds: float
    seconds: float  # of all of it


class Learner:
    """Takes in feedback and updates its drafter when that is due."""

    def __init__(
        self, name: str, experiment: Experiment, config: AdaptConfig, drift: DriftConfig, redis_url: str
    ) -> None:
        files = experiment.target.files
        storage = StorageConfig(home=experiment.folder / name, redis_url=redis_url)
        self._config = config
        self._database = open_database(storage.sql_url)
        migrate(self._database)
        self._blobs = WeightsStore(storage.weights_folder)
        self._versions = Versions(self._blobs, files, experiment.embedding)
        self._registry, self._windows = Registry(self._database), Windows(self._database, self._blobs)
        self._drafter = register(experiment.first, name, files, self._registry, self._versions)
        self._redis = consume(redis_url)
        self._stream = FeedbackStream(self._redis, name)
        self._housekeeper = Housekeeper(self._database, self._redis, storage, config.trigger, drift)
        self._first = self._registry.live(name)

    def live(self) -> tuple[int, LearntDrafter]:
        """The live version's number, and its weights as a server would load them."""
        version = self._registry.live(self._drafter.name)
        return version.number, self._versions.load(version, self._drafter)

    def training(self, number: int) -> TrainingReport | None:
        """The run that made a version."""
        return self._registry.training(self._registry.version(self._drafter.name, number))

    def take_in(self, records: Sequence[FeedbackRecord]) -> list[Update]:
        """Put records on the stream, as a server does, and do the updates that are due then."""
        refusals = self._stream.append([encode(record) for record in records])
        if refusals:
            raise refusals[0]
        self._housekeeper.fold_history()
        return list(self._due())

    def close(self) -> None:
        self._redis.close()
        self._database.dispose()

    def _due(self) -> Iterator[Update]:
        while jobs := self._housekeeper.sweep():
            made = [update for job in jobs if (update := self._update(job)) is not None]
            yield from made
            if not made:  # what waits is too little for a window
                return

    def _update(self, job: int) -> Update | None:
        """Do one job; None where it found nothing to do."""
        lease = Jobs(self._database).take(job, "bench", LEASE_SECONDS)
        if lease is None:
            return None
        before, began = self._newest(), time.perf_counter()
        registry = Registry(self._database, lease)
        stores = Stores(self._stream, self._windows, registry, self._versions, lease)
        decision = adapt_once(self._drafter, stores, self._config, lambda: None)
        Jobs(self._database).finish(lease, "done", decision.reason if decision else "nothing to decide")
        window = self._newest()
        if window is None or (before is not None and before.id == window.id):
            return None
        reason = decision.reason if decision else "there was nothing to learn from"
        return self._told(window, reason, time.perf_counter() - began)

    def _told(self, window: Window, reason: str, seconds: float) -> Update:
        candidate = self._registry.candidate_of(window.id)
        run = self._registry.training(candidate) if candidate else None
        self._forget(candidate)
        return Update(
            cause=window.cause,
            records=window.training,
            outcome=window.outcome,
            reason=reason,
            version=candidate.number if candidate else None,
            training_seconds=run.seconds if run else 0.0,
            seconds=seconds,
        )

    def _newest(self) -> Window | None:
        return next(iter(self._windows.recent(self._drafter.name, 1)), None)

    def _forget(self, candidate: Version | None) -> None:
        """Delete the files of what is neither live nor version 1: an update after every few requests fills a disk."""
        if candidate is None:
            return
        live = self._registry.live(self._drafter.name)
        needed = {digest for version in (self._first, live) for digest in self._files_of(version)}
        parent = self._registry.version(candidate.drafter, candidate.parent or 1)
        for digest in {*self._files_of(candidate), *self._files_of(parent)} - needed:
            self._blobs.delete(digest)

    def _files_of(self, version: Version) -> list[str]:
        """Weights, and the optimiser's moments where they were kept."""
        run = self._registry.training(version)
        return [version.weights_sha256, *([run.moments_sha256] if run and run.moments_sha256 else [])]
