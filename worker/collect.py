"""The first step of an update: waiting feedback becomes a window, stored before it is acknowledged.

A window is stored in SQL and the weights store in one go, so a crash at any line loses nothing and uses no
record twice: a stored window that was not decided on is picked up again before new feedback is read.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import structlog

from storage import left_out
from storage.drift import DriftStore
from storage.jobs import Lease
from storage.records import FeedbackRecord
from storage.registry import Drafter
from storage.stream import ADAPT, FeedbackStream, Waiting
from storage.windows import Window, Windows
from worker.config import TriggerConfig
from worker.guards import LOOK_AHEAD, Sifted, sift

log = structlog.get_logger()

CONSUMER = "trainer"  # one name: the lease admits one trainer, and the next takes up what it left unacknowledged
SIZE, AGE, DRIFT = "size", "age", "drift"
Teach = Callable[[list[FeedbackRecord]], list[FeedbackRecord]]  # the same records, some with other rows


def due(waiting: Waiting, config: TriggerConfig, alarmed: bool = False) -> str:
    """Why an update is due: size or age, as the paper triggers (arXiv 2310.07177, figure 1), or drift; "" if not."""
    if waiting.count >= config.window_records:
        return SIZE
    if waiting.count < config.window_minimum:
        return ""
    if alarmed and config.drift_trigger:
        return DRIFT
    return AGE if waiting.oldest_age_seconds >= config.window_age_seconds else ""


def collect(
    stream: FeedbackStream,
    windows: Windows,
    drafter: Drafter,
    vocab_size: int,
    config: TriggerConfig,
    lease: Lease,
    teach: Teach = lambda records: records,
) -> Window | None:
    """The window to learn from: one that a crash left undecided, or a new one when an update is due.

    Too few sound records make no window: they stay on the stream until more have come. `teach` gives those of a window
    other rows of the target's before they are stored; after a crash it is asked again.
    """
    undecided = windows.open(drafter.name)
    if undecided is not None:
        return undecided
    cause = due(stream.waiting(ADAPT), config, DriftStore(windows.engine).pending(drafter.name))
    if not cause:
        return None
    sifted, lost = _read(stream, drafter, vocab_size, config)
    enough = len(sifted.kept) >= min(config.window_minimum, config.window_records)
    training, holdout = _split(sifted.kept, config.holdout_share)
    window = None
    if enough and training:
        training, holdout = _split(teach(sifted.kept), config.holdout_share)
        window = windows.keep(drafter.name, training, holdout, lease, cause, sifted.left_out)
    for entry in sifted.refused:
        stream.quarantine(entry.entry_id, entry.data, entry.reason)
    left_out.count(windows.engine, drafter.name, sifted.left_out, sifted.reasons)
    stream.acknowledge(ADAPT, [*sifted.left_out_ids, *(sifted.kept_ids if enough else [])])
    log.info(
        "window.collected" if enough else "window.too_few",
        drafter=drafter.name,
        window=window.id if window else None,
        cause=cause,
        training=len(training),
        holdout=len(holdout),
        lost=lost,
        **sifted.left_out,
    )
    return window


def _read(stream: FeedbackStream, drafter: Drafter, vocab_size: int, config: TriggerConfig) -> tuple[Sifted, int]:
    """The next stretch of the stream, sifted, and how many entries were lost; a flooded one is read further."""
    batch = stream.read(ADAPT, CONSUMER, config.window_records)
    sifted, lost = sift(batch.entries, drafter, vocab_size, config), batch.lost
    if sifted.flooded:
        batch = stream.read(ADAPT, CONSUMER, LOOK_AHEAD * config.window_records)
        sifted, lost = sift(batch.entries, drafter, vocab_size, config), lost + batch.lost
    return sifted, lost


def _split(
    records: Sequence[FeedbackRecord], share: float
) -> tuple[tuple[FeedbackRecord, ...], tuple[FeedbackRecord, ...]]:
    """(training, holdout)"""
    training = tuple(r for r in records if not in_holdout(r.request_id, share))
    return training, tuple(r for r in records if in_holdout(r.request_id, share))


def in_holdout(request_id: str, share: float) -> bool:
    """Whether a request belongs to the holdout: a fixed property of its id, so never both."""
    return int.from_bytes(sha256(request_id.encode()).digest()[:8]) < share * 2**64
