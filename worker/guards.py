"""What keeps a poisoned or lopsided stretch of the stream from becoming a window: pure decisions, counted by guard.

A record that is not sound is quarantined. Of one prompt and output that come again and again, a few copies stay. A
workload or tenant that floods the stream gets no more than its share where there are others, and for these the
stream is searched further than the window is long.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from storage.records import FeedbackRecord, RecordRefused, decode
from storage.registry import Drafter
from storage.validation import validate
from worker.config import TriggerConfig

QUARANTINED, NOT_LEARNABLE, REPEATED, CROWDING = "quarantined", "not_learnable", "repeated", "crowding"
LOOK_AHEAD = 4  # windows that are searched for the other workloads and tenants of a flooded stream

Entry = tuple[bytes, bytes]  # id on the stream, encoded record


@dataclass(frozen=True)
class Refused:
    """An entry for the quarantine."""

    entry_id: bytes
    data: bytes
    reason: str


@dataclass
class Sifted:
    """What a stretch of the stream came to. Entries that are named nowhere here stay for a later window."""

    kept: list[FeedbackRecord] = field(default_factory=list)
    kept_ids: list[bytes] = field(default_factory=list)
    left_out_ids: list[bytes] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)  # the newest by guard

    @property
    def flooded(self) -> bool:
        return self.left_out[CROWDING] > 0

    def keep(self, entry_id: bytes, record: FeedbackRecord) -> None:
        self.kept.append(record)
        self.kept_ids.append(entry_id)

    def leave_out(self, entry_id: bytes, guard: str, reason: str) -> None:
        self.left_out_ids.append(entry_id)
        self.left_out[guard] += 1
        self.reasons[guard] = reason


def sift(entries: Sequence[Entry], drafter: Drafter, vocab_size: int, config: TriggerConfig) -> Sifted:
    """The records for a window, in the order of the stream, at most `window_records`.

    What a flooding workload or tenant has too much is left out among the first `window_records` entries; beyond
    them it is only passed over.
    """
    sifted = Sifted()
    sound = list(_sound(entries, drafter, vocab_size, sifted))
    first = {entry_id for entry_id, _ in entries[: config.window_records]}
    crowding = _crowding([record for _, record in sound], config)
    copies: Counter[bytes] = Counter()
    for entry_id, record in sound:
        if len(sifted.kept) == config.window_records:
            break
        copies[content(record)] += 1
        if copies[content(record)] > config.window_copies:
            reason = f"an identical prompt and output, beyond {config.window_copies} copies"
            sifted.leave_out(entry_id, REPEATED, reason)
        elif (reason := crowding(record)) == "":
            sifted.keep(entry_id, record)
        elif entry_id in first:
            sifted.leave_out(entry_id, CROWDING, reason)
    return sifted


def learnable(record: FeedbackRecord, drafter: Drafter) -> bool:
    """Opted-out, structured and lossy requests teach nothing, nor does another target's or tokenizer's text."""
    same = (record.target_fingerprint, record.tokenizer_fingerprint) == (
        drafter.target_fingerprint,
        drafter.tokenizer_fingerprint,
    )
    return record.train and record.lossless and not record.structured and same and len(record.output) > 1


def content(record: FeedbackRecord) -> bytes:
    """What was said: equal for requests that are copies of each other."""
    length = len(record.prompt_ids).to_bytes(8)
    return sha256(length + record.prompt_ids + record.output_ids).digest()


def distinct(records: Iterable[FeedbackRecord], copies: int) -> list[FeedbackRecord]:
    """The records, without copies of one prompt and output beyond `copies`."""
    seen: Counter[bytes] = Counter()
    found = []
    for record in records:
        said = content(record)
        seen[said] += 1
        if seen[said] <= copies:
            found.append(record)
    return found


def _sound(
    entries: Sequence[Entry], drafter: Drafter, vocab_size: int, sifted: Sifted
) -> Iterable[tuple[bytes, FeedbackRecord]]:
    """The entries that can be learnt from; the others are noted in `sifted`."""
    for entry_id, data in entries:
        try:
            record = decode(data)
            validate(record, vocab_size)
        except RecordRefused as refusal:
            sifted.refused.append(Refused(entry_id, data, str(refusal)))
            sifted.leave_out(entry_id, QUARANTINED, str(refusal))
            continue
        if learnable(record, drafter):
            yield entry_id, record
        else:
            sifted.leave_out(entry_id, NOT_LEARNABLE, "opted out, structured, lossy, or of another target")


def _crowding(records: Sequence[FeedbackRecord], config: TriggerConfig) -> Callable[[FeedbackRecord], str]:
    """Why one more record would exceed its workload's or tenant's share; "" where it does not, and is counted."""
    most = max(1, int(config.window_share * config.window_records))
    limited = [
        (name, label)
        for name, label in (("workload", _workload), ("tenant", _tenant))
        if len({label(record) for record in records}) > 1
    ]
    taken: Counter[tuple[str, str]] = Counter()

    def reason(record: FeedbackRecord) -> str:
        for name, label in limited:
            if taken[name, label(record)] >= most:
                return f"one {name} had its share of {config.window_share:g} of a window"
        taken.update((name, label(record)) for name, label in limited)
        return ""

    return reason


def _workload(record: FeedbackRecord) -> str:
    return record.workload


def _tenant(record: FeedbackRecord) -> str:
    return record.tenant
