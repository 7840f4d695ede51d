"""The first step of an update: waiting feedback becomes a window, stored before it is acknowledged.

A window is stored in SQL and the weights store in one go, so a crash at any line loses nothing and uses no
record twice: a stored window that was not decided on is picked up again before new feedback is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import structlog

from storage.jobs import Lease
from storage.records import FeedbackRecord, RecordRefused, decode, validate
from storage.registry import Drafter
from storage.stream import ADAPT, FeedbackStream, Waiting
from storage.windows import Window, Windows
from worker.config import TriggerConfig

log = structlog.get_logger()

CONSUMER = "trainer"  # one name: the lease admits one trainer, and the next takes up what it left unacknowledged


@dataclass(frozen=True)
class Sorted:
    """What a batch of entries came to."""

    training: tuple[FeedbackRecord, ...]
    holdout: tuple[FeedbackRecord, ...]
    skipped: int  # sound, but not to be learnt from


def due(waiting: Waiting, config: TriggerConfig) -> bool:
    """Size or age, as the paper triggers (arXiv 2310.07177, figure 1)."""
    if waiting.count >= config.window_records:
        return True
    return waiting.count >= config.window_minimum and waiting.oldest_age_seconds >= config.window_age_seconds


def collect(
    stream: FeedbackStream,
    windows: Windows,
    drafter: Drafter,
    vocab_size: int,
    config: TriggerConfig,
    lease: Lease,
) -> Window | None:
    """The window to learn from: one that a crash left undecided, or a new one when an update is due."""
    undecided = windows.open(drafter.name)
    if undecided is not None:
        return undecided
    if not due(stream.waiting(ADAPT), config):
        return None
    batch = stream.read(ADAPT, CONSUMER, config.window_records)
    found = sort(batch.entries, stream, drafter, vocab_size, config.holdout_share)
    window = windows.keep(drafter.name, found.training, found.holdout, lease) if found.training else None
    stream.acknowledge(ADAPT, [entry_id for entry_id, _ in batch.entries])
    log.info(
        "window.collected",
        drafter=drafter.name,
        window=window.id if window else None,
        training=len(found.training),
        holdout=len(found.holdout),
        skipped=found.skipped,
        lost=batch.lost,
    )
    return window


def sort(
    entries: Sequence[tuple[bytes, bytes]],
    stream: FeedbackStream,
    drafter: Drafter,
    vocab_size: int,
    holdout_share: float,
) -> Sorted:
    """Decode, validate and split entries; what is broken goes to the quarantine with its reason."""
    training: list[FeedbackRecord] = []
    holdout: list[FeedbackRecord] = []
    skipped = 0
    for entry_id, data in entries:
        try:
            record = decode(data)
            validate(record, vocab_size)
        except RecordRefused as refusal:
            stream.quarantine(entry_id, data, str(refusal))
            continue
        if not learnable(record, drafter):
            skipped += 1
        elif in_holdout(record.request_id, holdout_share):
            holdout.append(record)
        else:
            training.append(record)
    return Sorted(tuple(training), tuple(holdout), skipped)


def learnable(record: FeedbackRecord, drafter: Drafter) -> bool:
    """Opted-out, structured and lossy requests teach nothing, nor does another target's or tokenizer's text."""
    same = (record.target_fingerprint, record.tokenizer_fingerprint) == (
        drafter.target_fingerprint,
        drafter.tokenizer_fingerprint,
    )
    return record.train and record.lossless and not record.structured and same and len(record.output) > 1


def in_holdout(request_id: str, share: float) -> bool:
    """Whether a request belongs to the holdout: a fixed property of its id, so never both."""
    return int.from_bytes(sha256(request_id.encode()).digest()[:8]) < share * 2**64
