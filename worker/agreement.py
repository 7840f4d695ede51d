"""Drift where the governor decodes plainly: the trainer replays some of those requests with the live drafter.

Such a request has no rounds, so what is counted is how often the drafter would have chosen the emitted token. That is
exact for greedy requests, and costs one pass of the drafter over the text, no target. A few a time are enough for the
detectors; under heavy traffic they are a sample, the newest.
"""

from collections.abc import Sequence

from redis import Redis
from sqlalchemy import Engine

from adapter.drafters.learnt import LearntDrafter
from adapter.drift import DriftConfig, Sample, follow, is_plain
from adapter.replay import matches
from adapter.versions import Versions
from storage.config import StorageConfig
from storage.drift import DriftStore
from storage.records import FeedbackRecord, RecordRefused, decode
from storage.registry import Drafter, Registry, Version
from storage.stream import FeedbackStream
from storage.validation import validate
from worker.alarms import tell

REQUESTS = 16  # replayed at a time, at most
PLAIN = "greedy, plain"  # the series' policy


class Agreement:
    """Keeps the agreement series of a target's drafters."""

    def __init__(
        self, database: Engine, redis: Redis, weights: Versions, storage: StorageConfig, config: DriftConfig
    ) -> None:
        self._registry, self._store, self._redis = Registry(database), DriftStore(database), redis
        self._weights, self._storage, self._config = weights, storage, config
        self._loaded: tuple[int, LearntDrafter] | None = None  # by the version's id

    def look(self, target_fingerprint: str) -> int:
        """Replay the newest plainly decoded requests; how many."""
        drafters = [d for d in self._registry.drafters() if d.target_fingerprint == target_fingerprint]
        return sum(self._look(drafter) for drafter in drafters)

    def _look(self, drafter: Drafter) -> int:
        stream = FeedbackStream(self._redis, drafter.name, self._storage.stream_length, self._storage.retention_hours)
        records = plainly_decoded(stream.newest(REQUESTS), drafter, self._weights.vocab_size)
        if not records:
            return 0
        live = self._registry.live(drafter.name)
        model = self._model(live, drafter)
        if model.taps:
            return 0  # what it would propose depends on hidden states of the target, which nobody has read here
        samples = [agreement(model, record) for record in records]
        alarms = self._store.revise(drafter.name, lambda known: follow(known, samples, live.number, self._config))
        tell(drafter.name, alarms)
        return len(samples)

    def _model(self, live: Version, drafter: Drafter) -> LearntDrafter:
        if self._loaded is None or self._loaded[0] != live.id:
            self._loaded = (live.id, self._weights.load(live, drafter))
        return self._loaded[1]


def plainly_decoded(entries: Sequence[bytes], drafter: Drafter, vocab_size: int) -> list[FeedbackRecord]:
    """The sound greedy requests that no drafter proposed for."""
    found = []
    for data in entries:
        try:
            record = decode(data)
            validate(record, vocab_size)
        except RecordRefused:
            continue  # it is quarantined where windows are made
        if record.target_fingerprint == drafter.target_fingerprint and is_plain(record):
            found.append(record)
    return found


def agreement(model: LearntDrafter, record: FeedbackRecord) -> Sample:
    """How many of the output's tokens the drafter would have chosen; the first, which no round proposes, apart."""
    matched = matches(model, record)[1:]
    return Sample(record.workload, PLAIN, int(matched.sum()), len(matched))
