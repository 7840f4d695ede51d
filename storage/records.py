"""The wire format: what a finished request leaves behind for the adapter, as one frozen, versioned record.

Written by `service/feedback`, carried by the Redis stream, read by `worker/collect`. MessagePack through
msgspec, arrays as raw little-endian bytes; no tensors, no pickles, no text of the prompt.

A row of `TeacherRows` belongs to the context *before* the token that was refused, so row r teaches the
token at output index `positions[r]` (the published OSD code is off by one here).
"""

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA_VERSION: Final = 1
MASS_TOLERANCE: Final = 0.01  # float16 rounding of up to a few hundred log-probabilities


class RecordRefused(ValueError):
    """A record that cannot be used; the message says which rule it broke."""


class Round(msgspec.Struct, frozen=True, array_like=True):
    """One round of one request. A rejection happened if and only if accepted < proposed.

    A round cut short (end of text, stop string, max_tokens) counts as proposed only what was committed.
    """

    start: int  # output index of the first proposed token
    version: int  # number of the drafter version that proposed
    proposed: int
    accepted: int
    rejected_token: int  # -1 where nothing was rejected
    rejected_q: float  # the drafter's probability of the rejected token; 1.0 under greedy drafting
    draft_ms: float
    verify_ms: float


class TeacherRows(msgspec.Struct, frozen=True, array_like=True):
    """The target's distribution (temperature 1) at R output positions: top K and the mass outside them."""

    top_k: int
    positions: bytes  # int32 [R], ascending
    ids: bytes  # int32 [R, K], by falling probability
    log_probs: bytes  # float16 [R, K]
    tail_log_mass: bytes  # float32 [R]; log(1 - sum of the K); -inf where nothing is outside

    def arrays(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(positions [R], ids [R, K], log-probabilities [R, K], log of the tail mass [R])."""
        positions = np.frombuffer(self.positions, dtype="<i4")
        shape = (len(positions), self.top_k)
        ids = np.frombuffer(self.ids, dtype="<i4").reshape(shape)
        log_probs = np.frombuffer(self.log_probs, dtype="<f2").astype(np.float32).reshape(shape)
        return positions, ids, log_probs, np.frombuffer(self.tail_log_mass, dtype="<f4")


class FeedbackRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request (schema 1)."""

    schema_version: int
    record_id: str  # idempotency key: a record is used once, however often it arrives
    request_id: str
    finished_at: float  # seconds since the epoch, UTC
    tenant: str
    workload: str
    source: str  # reference, vllm, sidecar, ...
    target_fingerprint: str
    tokenizer_fingerprint: str
    drafter: str  # name
    temperature: float
    top_p: float
    top_k: int
    structured: bool  # structured output: counted, never trained on
    lossless: bool
    train: bool  # False: the client opted out; counted, never trained on
    prompt_ids: bytes  # int32 [P]
    output_ids: bytes  # int32 [T]
    finish_reason: str
    rounds: tuple[Round, ...]
    teacher: TeacherRows
    time_to_first_token_ms: float
    total_ms: float
    resident_mb: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def policy(self) -> str:
        """The bucket of sampling settings under which acceptance is reported."""
        return "greedy" if self.greedy else f"t{self.temperature:.1f}"

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt_ids, dtype="<i4")

    @property
    def output(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.output_ids, dtype="<i4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FeedbackRecord)
_many = msgspec.msgpack.Decoder(tuple[FeedbackRecord, ...])


def int32(values: list[int] | npt.NDArray[np.int64]) -> bytes:
    """Token ids as the wire format's little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def encode(record: FeedbackRecord) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> FeedbackRecord:
    """Read one record; raises `RecordRefused` where it is not a record of this schema."""
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordRefused(f"not a feedback record: {error}") from error
    if record.schema_version != SCHEMA_VERSION:
        raise RecordRefused(f"schema {record.schema_version}; this version reads schema {SCHEMA_VERSION}")
    return record


def encode_many(records: tuple[FeedbackRecord, ...]) -> bytes:
    return _encoder.encode(records)


def decode_many(data: bytes) -> tuple[FeedbackRecord, ...]:
    return _many.decode(data)


def validate(record: FeedbackRecord, vocab_size: int) -> None:
    """Raise `RecordRefused` unless ids lie in the vocabulary, sums agree and log-probabilities are sound."""
    _validate_tokens(record, vocab_size)
    _validate_rounds(record)
    _validate_teacher(record, vocab_size)


def _validate_tokens(record: FeedbackRecord, vocab_size: int) -> None:
    for name, data in (("prompt", record.prompt_ids), ("output", record.output_ids)):
        if len(data) % 4:
            raise RecordRefused(f"{name} ids are not whole int32 values")
        ids = np.frombuffer(data, dtype="<i4")
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise RecordRefused(f"{name} ids outside the vocabulary of {vocab_size}")
    if not len(record.prompt_ids):
        raise RecordRefused("empty prompt")


def _validate_rounds(record: FeedbackRecord) -> None:
    length, end = len(record.output), 0
    for r in record.rounds:
        if not 0 <= r.accepted <= r.proposed or r.start < end or r.start + r.accepted > length:
            raise RecordRefused(f"round at {r.start}: {r.accepted} of {r.proposed} accepted, output of {length}")
        end = r.start + r.accepted + (r.accepted < r.proposed)


def _validate_teacher(record: FeedbackRecord, vocab_size: int) -> None:
    rows = record.teacher
    if rows.top_k < 1 and rows.positions:
        raise RecordRefused("teacher rows without a top-K")
    try:
        positions, ids, log_probs, tail = rows.arrays()
    except ValueError as error:
        raise RecordRefused(f"teacher rows of unequal lengths: {error}") from error
    if len(tail) != len(positions):
        raise RecordRefused("teacher rows of unequal lengths")
    if not len(positions):
        return
    if positions.min() < 0 or positions.max() >= len(record.output) or (np.diff(positions) <= 0).any():
        raise RecordRefused("teacher positions outside the output or out of order")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RecordRefused(f"teacher ids outside the vocabulary of {vocab_size}")
    if np.isnan(log_probs).any() or np.isnan(tail).any() or (log_probs > 0).any() or (tail > 0).any():
        raise RecordRefused("teacher log-probabilities must be numbers of at most 0")
    mass = np.exp(log_probs).sum(axis=1) + np.exp(tail)
    if (mass > 1 + MASS_TOLERANCE).any() or (mass < 1 - MASS_TOLERANCE).any():
        raise RecordRefused(f"teacher rows hold a mass of {mass.min():.3f} to {mass.max():.3f}, not 1")
