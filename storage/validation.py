"""What a feedback record must satisfy before anything is learnt or counted from it.

A record comes from another process, perhaps of another make. One that breaks a rule goes to the quarantine with the
reason (`worker/collect`); it must neither end the worker nor reach a drafter or the history.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.records import FeedbackRecord, RecordRefused, Round

MASS_TOLERANCE: Final = 0.01  # float16 rounding of up to a few hundred log-probabilities
ROUNDING: Final = 0.0625  # of a small log-probability in float16
TIE: Final = 0.5  # of log-probability: what is nearer may change places between two passes in bf16
LONGEST_LABEL: Final = 64
LABEL: Final = r"^[A-Za-z0-9._-]{1,64}$"  # a workload or a tenant as a client may name it in its headers
LONGEST_ID: Final = 256
LATEST: Final = 4_102_444_800.0  # seconds since the epoch; the year 2100
INT32: Final = 2**31 - 1

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def validate(record: FeedbackRecord, vocab_size: int) -> None:
    """Raise `RecordRefused` unless the record is sound and agrees with the target's vocabulary and with itself."""
    validate_figures(record)
    _validate_tokens(record, vocab_size)
    _validate_teacher(record, vocab_size)


def validate_figures(record: FeedbackRecord) -> None:
    """What can be checked without knowing the target, and all that the history needs."""
    _validate_labels(record)
    _validate_numbers(record)
    _validate_lengths(record)
    _validate_rounds(record)


def _validate_labels(record: FeedbackRecord) -> None:
    """Anything longer, or with a control character, some database would refuse."""
    for name in ("tenant", "workload"):
        label: str = getattr(record, name)
        if not 0 < len(label) <= LONGEST_LABEL or not label.isprintable():
            raise RecordRefused(f"{name} is not 1 to {LONGEST_LABEL} printable characters")
    for name in ("record_id", "request_id"):
        identity: str = getattr(record, name)
        if not 0 < len(identity) <= LONGEST_ID or not identity.isprintable():
            raise RecordRefused(f"{name} is not 1 to {LONGEST_ID} printable characters")


def _validate_numbers(record: FeedbackRecord) -> None:
    _not_negative("temperature", [record.temperature])
    _not_negative("times and memory", [record.time_to_first_token_ms, record.total_ms, record.resident_mb])
    if not 0 <= record.finished_at < LATEST:
        raise RecordRefused(f"finished at {record.finished_at}: no time between 1970 and 2100")


def _validate_lengths(record: FeedbackRecord) -> None:
    for name, data in (("prompt", record.prompt_ids), ("output", record.output_ids)):
        if len(data) % 4:
            raise RecordRefused(f"{name} ids are not whole int32 values")


def _validate_rounds(record: FeedbackRecord) -> None:
    length, end = len(record.output), 0
    for r in record.rounds:
        if not 0 <= r.accepted <= r.proposed or r.start < end or r.start + r.proposed > length:
            raise RecordRefused(f"round at {r.start}: {r.accepted} of {r.proposed} accepted, output of {length}")
        _validate_round(r)
        end = r.start + r.accepted + (r.accepted < r.proposed)


def _validate_round(r: Round) -> None:
    if not 0 <= r.version <= INT32:
        raise RecordRefused(f"round at {r.start}: version {r.version}")
    if not 0 <= r.rejected_q <= 1 or not -1 <= r.rejected_token <= INT32:
        raise RecordRefused(f"round at {r.start}: rejected token {r.rejected_token} with q {r.rejected_q}")
    _not_negative("times of a round", [r.draft_ms, r.verify_ms])


def _validate_tokens(record: FeedbackRecord, vocab_size: int) -> None:
    for name, ids in (("prompt", record.prompt), ("output", record.output)):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise RecordRefused(f"{name} ids outside the vocabulary of {vocab_size}")
    if not len(record.prompt):
        raise RecordRefused("empty prompt")
    if any(r.rejected_token >= vocab_size for r in record.rounds):
        raise RecordRefused(f"rejected ids outside the vocabulary of {vocab_size}")


def _validate_teacher(record: FeedbackRecord, vocab_size: int) -> None:
    rows = record.teacher
    if rows.top_k < 1 and rows.positions:
        raise RecordRefused("teacher rows without a top-K")
    try:
        positions, ids, log_probs, tail = rows.arrays()
        chances = rows.refusal_chances()
    except ValueError as error:
        raise RecordRefused(f"teacher rows of unequal lengths: {error}") from error
    if not len(tail) == len(chances) == len(positions):
        raise RecordRefused("teacher rows of unequal lengths")
    if not ((chances >= 0) & (chances <= 1 + MASS_TOLERANCE)).all():
        raise RecordRefused("chances of refusals must lie between 0 and 1")
    if not len(positions):
        return
    if positions.min() < 0 or positions.max() >= len(record.output) or (np.diff(positions) <= 0).any():
        raise RecordRefused("teacher positions outside the output or out of order")
    _validate_ids(ids, vocab_size)
    _validate_mass(log_probs, tail, vocab_size)
    if record.exact:
        _validate_choices(record.output[positions], ids, log_probs, positions)


def _validate_ids(ids: Ints, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RecordRefused(f"teacher ids outside the vocabulary of {vocab_size}")
    if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        raise RecordRefused("a teacher row names an id twice")


def _validate_mass(log_probs: Floats, tail: Floats, vocab_size: int) -> None:
    if np.isnan(log_probs).any() or np.isnan(tail).any() or (log_probs > 0).any() or (tail > 0).any():
        raise RecordRefused("teacher log-probabilities must be numbers of at most 0")
    with np.errstate(invalid="ignore"):  # between two that are minus infinity there is no difference
        rising = np.diff(log_probs, axis=1) > 0
    if rising.any():
        raise RecordRefused("teacher rows are not in the order of falling probability")
    outside = np.exp(tail)
    mass = np.exp(log_probs).sum(axis=1) + outside
    if (mass > 1 + MASS_TOLERANCE).any() or (mass < 1 - MASS_TOLERANCE).any():
        raise RecordRefused(f"teacher rows hold a mass of {mass.min():.3f} to {mass.max():.3f}, not 1")
    most = (vocab_size - log_probs.shape[1]) * np.exp(log_probs[:, -1] + ROUNDING)
    if (outside > most + MASS_TOLERANCE).any():
        raise RecordRefused("a teacher row has more mass outside its top K than ids outside it could hold")


def contradicted(record: FeedbackRecord) -> tuple[int, int]:
    """(greedy tokens that have a row of the target's, those among them that the target finds clearly less likely).

    Of a sound record only; what is said of greedy requests holds whether or not their engine counts as lossless.
    """
    positions, ids, log_probs, _ = record.teacher.arrays()
    if not record.greedy or record.adjusted or record.structured or not record.train or not len(positions):
        return 0, 0
    return len(positions), int(_unlikely(record.output[positions], ids, log_probs).sum())


def _unlikely(emitted: Ints, ids: Ints, log_probs: Floats) -> npt.NDArray[np.bool_]:
    """Which tokens are not their row's first, but for near-ties. What is not among the K counts as the last of them."""
    own = np.where(ids == emitted[:, None], log_probs, log_probs[:, -1:]).max(axis=1)
    return np.asarray(own < log_probs[:, 0] - TIE)


def _validate_choices(emitted: Ints, ids: Ints, log_probs: Floats, positions: Ints) -> None:
    """Temperature 0: the emitted token is the row's first, but for near-ties; else rows and text are not of one run."""
    odd = np.flatnonzero(_unlikely(emitted, ids, log_probs))
    if len(odd):
        at = int(positions[odd[0]])
        raise RecordRefused(f"the greedy token at output index {at} is not the one its teacher row finds likeliest")


def _not_negative(what: str, values: Iterable[float]) -> None:
    if not all(0 <= value < float("inf") for value in values):
        raise RecordRefused(f"{what} must be finite and not negative")
