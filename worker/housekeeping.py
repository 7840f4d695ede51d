"""What keeps the circle going besides learning: due updates, lost doorbells, the history, and garbage."""

from datetime import timedelta

import structlog
from redis import Redis, RedisError
from sqlalchemy import Engine

from storage import garbage, history
from storage.announcements import announce_pending
from storage.config import StorageConfig
from storage.jobs import Jobs
from storage.records import FeedbackRecord, RecordRefused, decode
from storage.registry import Registry
from storage.stream import ADAPT, HISTORY, FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from worker.collect import due
from worker.config import TriggerConfig

log = structlog.get_logger()

FOLD_BATCH = 256
CONSUMER = "housekeeper"


class Housekeeper:
    """The housekeeping tasks' work, over the stores that they need. No torch here."""

    def __init__(self, database: Engine, redis: Redis, storage: StorageConfig, trigger: TriggerConfig) -> None:
        self._database, self._redis, self._storage, self._trigger = database, redis, storage, trigger
        self._jobs = Jobs(database)
        self._blobs = WeightsStore(storage.weights_folder)

    def sweep(self) -> list[int]:
        """The job ids to ring for: of updates that are now due, and of jobs whose doorbell or worker was lost."""
        windows = Windows(self._database, self._blobs)
        for drafter in Registry(self._database).drafters():
            stream = self._stream(drafter.name)
            stream.trim()
            if windows.open(drafter.name) is not None or due(stream.waiting(ADAPT), self._trigger):
                self._jobs.request("adapt", drafter.name)
        self._send_outbox()
        return self._jobs.due()

    def _send_outbox(self) -> None:
        """Announce pointer moves that were committed but not sent. Servers poll too: this only makes it quick."""
        try:
            announce_pending(self._database, self._redis)
        except RedisError as error:
            log.warning("outbox.unsent", error=type(error).__name__)

    def fold_history(self) -> int:
        """Fold all waiting feedback into the acceptance history; how many records were new."""
        folded = 0
        for drafter in Registry(self._database).drafters(include_retired=True):
            stream = self._stream(drafter.name)
            while (batch := stream.read(HISTORY, CONSUMER, FOLD_BATCH)).entries:
                records = [r for _, data in batch.entries if (r := _decoded(data)) is not None]
                folded += history.fold(self._database, records)
                stream.acknowledge(HISTORY, [entry_id for entry_id, _ in batch.entries])
        return folded

    def collect_garbage(self) -> int:
        """Delete files that no row names, and the memory of folded records that cannot come again; how many files."""
        history.forget(self._database, timedelta(hours=2 * self._storage.retention_hours))
        return garbage.collect(self._database, self._blobs, self._storage.retention_hours)

    def _stream(self, drafter: str) -> FeedbackStream:
        return FeedbackStream(self._redis, drafter, self._storage.stream_length, self._storage.retention_hours)


def _decoded(data: bytes) -> FeedbackRecord | None:
    try:
        return decode(data)
    except RecordRefused:
        return None  # the adapt group puts it into the quarantine, with the reason
