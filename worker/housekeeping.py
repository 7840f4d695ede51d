"""What keeps the circle going besides learning: due updates, lost doorbells, the history, and garbage."""

from datetime import timedelta

import structlog
from redis import Redis, RedisError
from sqlalchemy import Engine

from adapter.drift import DriftConfig, follow, is_plain, sampled
from storage import garbage, history, left_out, purge, retention, target_changes
from storage.announcements import announce_pending
from storage.config import StorageConfig
from storage.drift import DriftStore
from storage.jobs import Jobs
from storage.records import FeedbackRecord, RecordRefused, decode
from storage.registry import Drafter, Registry
from storage.retention import RetentionConfig
from storage.servers import Servers
from storage.stream import ADAPT, HISTORY, FeedbackStream
from storage.validation import validate_figures
from storage.weights import WeightsStore
from storage.windows import Windows
from worker.alarms import tell
from worker.collect import due
from worker.config import TriggerConfig

log = structlog.get_logger()

FOLD_BATCH = 256
CONSUMER = "housekeeper"
OTHER_TARGET = "other_target"  # the guard that keeps such records out of the history


class Housekeeper:
    """The housekeeping tasks' work, over the stores that they need. No torch here."""

    def __init__(
        self,
        database: Engine,
        redis: Redis,
        storage: StorageConfig,
        trigger: TriggerConfig,
        drift: DriftConfig | None = None,
        kept: RetentionConfig | None = None,
    ) -> None:
        self.saw_plain = False  # whether the last fold met requests that only a replay can say something of
        self.target_changed = False  # whether a drafter was stopped for that, and none goes on for the new target
        self._kept = kept or RetentionConfig()
        self._drift, self._drift_store = drift or DriftConfig(), DriftStore(database)
        self._database, self._redis, self._storage, self._trigger = database, redis, storage, trigger
        self._jobs = Jobs(database)
        self._blobs = WeightsStore(storage.weights_folder)

    def sweep(self) -> list[int]:
        """The job ids to ring for: of updates that are now due, and of jobs whose doorbell or worker was lost."""
        windows, stopped = Windows(self._database, self._blobs), target_changes.stopped(self._database)
        self.target_changed = any(not change.successor for change in stopped.values())
        for drafter in Registry(self._database).drafters(include_retired=True):
            stream = self._stream(drafter.name)
            stream.trim()
            if drafter.retired_at is not None or drafter.name in stopped:
                continue
            alarmed = self._drift_store.pending(drafter.name)
            undecided = windows.open(drafter.name) is not None
            if undecided or (due(stream.waiting(ADAPT), self._trigger, alarmed) and not self._canary_out(drafter.name)):
                self._jobs.request("adapt", drafter.name)
        self.send_outbox()
        return self._jobs.due()

    def _canary_out(self, drafter: str) -> bool:
        """A canary is to be judged first: its parent may soon be live no more. Feedback waits in the stream."""
        return Registry(self._database).pointer(drafter).canary is not None

    def send_outbox(self) -> None:
        """Announce pointer moves that were committed but not sent. Servers poll too: this only makes it quick."""
        try:
            announce_pending(self._database, self._redis)
        except RedisError as error:
            log.warning("outbox.unsent", error=type(error).__name__)

    def fold_history(self) -> int:
        """Fold all waiting feedback into the acceptance history, and look for drift in it; how many were new."""
        folded, self.saw_plain = 0, False
        for drafter in Registry(self._database).drafters(include_retired=True):
            stream = self._stream(drafter.name)
            while (batch := stream.read(HISTORY, CONSUMER, FOLD_BATCH)).entries:
                records = [r for _, data in batch.entries if (r := _decoded(data)) is not None]
                records = self._of_its_target(drafter, records)
                fresh = history.fold_new(self._database, records)
                self._look_for_drift(drafter.name, fresh)
                folded += len(fresh)
                stream.acknowledge(HISTORY, [entry_id for entry_id, _ in batch.entries])
        return folded

    def _of_its_target(self, drafter: Drafter, records: list[FeedbackRecord]) -> list[FeedbackRecord]:
        """The records that say something of this drafter; of those of another target, the newest one decides."""
        own = [record for record in records if record.target_fingerprint == drafter.target_fingerprint]
        if not records or drafter.retired_at is not None:
            return own
        newest = max(records, key=lambda record: record.finished_at)
        if newest.target_fingerprint != drafter.target_fingerprint:
            seen, by = newest.target_fingerprint, f"host {newest.source}"
            if change := target_changes.notice(self._database, drafter.name, seen, "records", by):
                log.error("target.changed", reason=change.reason)
        elif drafter.name in target_changes.stopped(self._database):
            target_changes.settle(self._database, drafter.name, f"host {newest.source}", ("records",))
        if others := len(records) - len(own):
            reason = "made by another target than the drafter's"
            left_out.count(self._database, drafter.name, {OTHER_TARGET: others}, {OTHER_TARGET: reason})
        return own

    def _look_for_drift(self, drafter: str, fresh: list[FeedbackRecord]) -> None:
        """After the fold, not in it: what a crash between the two hides from the detectors is a few requests."""
        if not fresh:
            return
        self.saw_plain = self.saw_plain or any(is_plain(record) for record in fresh)
        live = Registry(self._database).live(drafter).number
        samples = [sample for record in fresh if (sample := sampled(record, live)) is not None]
        tell(drafter, self._drift_store.revise(drafter, lambda known: follow(known, samples, live, self._drift)))

    def collect_garbage(self) -> int:
        """Delete what is past its retention, and files that no row names; how many of these."""
        hours = self._storage.retention_hours
        self._continue_purges(timedelta(hours=hours))
        history.forget(self._database, timedelta(hours=2 * hours))
        Servers(self._database).forget(timedelta(hours=self._kept.servers_hours))
        retention.expire(self._database, self._kept)
        return garbage.collect(self._database, self._blobs, hours)

    def _continue_purges(self, late: timedelta) -> None:
        """Finish purges that a crash or an unreachable Redis cut short, and delete what came in after one, too late."""
        drafters = Registry(self._database).drafters(include_retired=True)
        streams = [self._stream(drafter.name) for drafter in drafters]
        try:
            for begun in purge.unfinished(self._database):
                purge.finish(self._database, self._blobs, streams, begun)
            swept = purge.sweep_late(self._database, streams, late)
        except RedisError as error:
            log.warning("purge.unfinished", error=type(error).__name__)
            return
        if swept:
            log.info("purge.swept_late", records=swept)

    def _stream(self, drafter: str) -> FeedbackStream:
        return FeedbackStream(self._redis, drafter, self._storage.stream_length, self._storage.retention_hours)


def _decoded(data: bytes) -> FeedbackRecord | None:
    try:
        record = decode(data)
        validate_figures(record)
        return record
    except RecordRefused:
        return None  # the adapt group puts it into the quarantine, with the reason
