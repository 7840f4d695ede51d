"""From finished requests to the feedback stream: a bounded ring, and one thread that empties it into Redis.

`put` costs the caller a few microseconds and never waits, whatever Redis does: a full ring drops its oldest
record, and each record lost is counted with its reason. A failure closes the connection and opens the breaker;
the next try begins with a handshake, so an outage writes at most the batch that was in flight twice.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import structlog

from storage.config import StorageConfig, setting
from storage.records import FeedbackRecord, encode
from storage.redis_clients import hot
from storage.stream import FeedbackStream

BATCH = 64
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two tries while Redis is away

log = structlog.get_logger()


@dataclass(frozen=True)
class FeedbackConfig:
    """How much feedback a server holds back while Redis is slow or away."""

    feedback_queue: int = setting(2_000, "feedback records held while Redis is away; then the oldest go")


class FeedbackWriter:
    """Writes one drafter's records. Reasons of drops: full, refused, unreachable, encoding, closed."""

    def __init__(
        self,
        url: str,
        drafter: str,
        length: int = 20_000,
        retention_hours: float = 24.0,
        config: FeedbackConfig = FeedbackConfig(),
    ) -> None:
        self.capacity = config.feedback_queue
        self._client = hot(url)
        self._stream = FeedbackStream(self._client, drafter, length, retention_hours)
        self._ring: SimpleQueue[FeedbackRecord | None] = SimpleQueue()
        self._counts = threading.Lock()  # held for a count, never over a call to Redis
        self._written = 0
        self._dropped: Counter[str] = Counter()
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._failures = 0
        self._refusing = False
        self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)
        self._thread.start()

    @staticmethod
    def of(storage: StorageConfig, drafter: str, config: FeedbackConfig) -> "FeedbackWriter":
        """To the stream that the settings name."""
        return FeedbackWriter(storage.stream_url, drafter, storage.stream_length, storage.retention_hours, config)

    @property
    def written(self) -> int:
        """Records that Redis confirmed."""
        return self._written

    @property
    def dropped(self) -> dict[str, int]:
        """Records lost, by reason."""
        with self._counts:
            return dict(self._dropped)

    @property
    def waiting(self) -> int:
        """Records in the ring; the batch in flight is not among them."""
        return self._ring.qsize()

    @property
    def reachable(self) -> bool:
        return self._failures == 0

    def put(self, record: FeedbackRecord) -> None:
        """Hand over a finished request's record. Never waits, never raises."""
        if self._closing.is_set():
            self._drop("closed", 1)
            return
        if self._ring.qsize() >= self.capacity:
            self._drop_oldest()
        self._ring.put(record)

    def close(self, timeout: float = 2.0) -> None:
        """Write what is left, for at most about `timeout` seconds; what cannot be written is counted."""
        self._give_up_at = time.monotonic() + timeout
        self._closing.set()
        self._ring.put(None)  # wakes the thread
        self._thread.join(timeout + 1.0)
        self._drop("closed", len(self._drain(self._ring.qsize())))
        self._client.close()

    def _run(self) -> None:
        while not (self._closing.is_set() and self._ring.empty()):
            batch = self._encode(self._take())
            while batch and not self._write(batch):
                if not self._pause():
                    self._drop("unreachable", len(batch) + len(self._drain(self._ring.qsize())))
                    break

    def _take(self) -> list[FeedbackRecord]:
        """Wait for a record, then take what else is there, at most a batch."""
        first = self._ring.get()
        return ([first] if first is not None else []) + self._drain(BATCH - 1)

    def _drain(self, limit: int) -> list[FeedbackRecord]:
        taken: list[FeedbackRecord] = []
        try:
            while len(taken) < limit:
                if (record := self._ring.get_nowait()) is not None:
                    taken.append(record)
        except Empty:
            pass
        return taken

    def _encode(self, records: Sequence[FeedbackRecord]) -> list[bytes]:
        encoded = []
        for record in records:
            try:
                encoded.append(encode(record))
            except (TypeError, ValueError, OverflowError) as error:
                log.error("feedback.unencodable", error=type(error).__name__)
                self._drop("encoding", 1)
        return encoded

    def _write(self, batch: Sequence[bytes]) -> bool:
        """Append the batch; False when Redis could not be reached, so that it is tried again."""
        try:
            refusals = self._stream.append(batch)
        except Exception as error:  # whatever the client raises, this thread has to outlive it
            self._failed(error)
            return False
        self._recovered()
        with self._counts:
            self._written += len(batch) - len(refusals)
        self._note_refusals(refusals)
        return True

    def _note_refusals(self, refusals: Sequence[Exception]) -> None:
        """Count what the server would not take (out of memory, wrong type); log the first of a series."""
        if refusals:
            self._drop("refused", len(refusals))
            if not self._refusing:
                log.warning("feedback.refused", error=str(refusals[0])[:200])
        self._refusing = bool(refusals)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("feedback.unreachable", error=type(error).__name__)

    def _recovered(self) -> None:
        if self._failures:
            log.info("feedback.reachable", tries=self._failures, waiting=self.waiting)
        self._failures = 0

    def _pause(self) -> bool:
        """The open breaker: wait, longer each time and with jitter. False when closing leaves no time to."""
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        if self._closing.is_set():
            time.sleep(FIRST_PAUSE)
        else:
            self._closing.wait(seconds)
        return time.monotonic() < self._give_up_at

    def _drop_oldest(self) -> None:
        try:
            self._ring.get_nowait()
        except Empty:  # the thread was faster: there is room
            return
        self._drop("full", 1)

    def _drop(self, reason: str, count: int) -> None:
        if not count:
            return
        with self._counts:
            self._dropped[reason] += count
