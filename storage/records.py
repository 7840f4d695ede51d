"""The wire format: what a finished request leaves behind for the adapter, as one frozen, versioned record.

Written by `service/feedback`, carried by the Redis stream, read by `worker/collect`, which believes none of it before
`storage/validation` has looked. MessagePack through msgspec, arrays as raw little-endian bytes; no tensors, no
pickles, no text of the prompt.

A row of `TeacherRows` belongs to the context *before* the token that was refused, so row r teaches the
token at output index `positions[r]` (the published OSD code is off by one here).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA_VERSION: Final = 1
LOSSY: Final = " lossy"  # at the end of the policy of what was not verified exactly: never taken together with what was


class RecordRefused(ValueError):
    """A record that cannot be used; the message says which rule it broke."""


class Round(msgspec.Struct, frozen=True, array_like=True):
    """One round of one request. A rejection happened if and only if accepted < proposed.

    A round cut short (end of text, stop string, max_tokens) counts as proposed only what was committed. Of a tree,
    `accepted` is the length of the accepted path, and `proposed` the depth of the longest path through the node where
    it ended: more if and only if that node had children and all of them were refused. `rejected_token` is then the
    first of them, the drafter's best or first drawn. Version 0 is none: the proposal came out of n-grams.
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
    refusals: bytes = b""  # float32 [R]; the chance of the refusal that a row was logged for; 0, or no bytes: not known

    def arrays(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(positions [R], ids [R, K], log-probabilities [R, K], log of the tail mass [R])."""
        positions = np.frombuffer(self.positions, dtype="<i4")
        shape = (len(positions), self.top_k)
        ids = np.frombuffer(self.ids, dtype="<i4").reshape(shape)
        log_probs = np.frombuffer(self.log_probs, dtype="<f2").astype(np.float32).reshape(shape)
        return positions, ids, log_probs, np.frombuffer(self.tail_log_mass, dtype="<f4")

    def refusal_chances(self) -> npt.NDArray[np.float32]:
        """How likely the refusal was that each row was logged for [R], before chance had its say; 0: not known."""
        if not self.refusals:
            return np.zeros(len(self.positions) // 4, dtype=np.float32)
        return np.frombuffer(self.refusals, dtype="<f4")

    def at(self, wanted: Sequence[int]) -> "TeacherRows":
        """The rows at those of the output positions that have one."""
        positions, ids, log_probs, tail = self.arrays()
        kept = np.flatnonzero(np.isin(positions, wanted))
        return TeacherRows(
            top_k=self.top_k,
            positions=positions[kept].tobytes(),
            ids=ids[kept].tobytes(),
            log_probs=log_probs[kept].astype("<f2").tobytes(),
            tail_log_mass=tail[kept].tobytes(),
            refusals=self.refusal_chances()[kept].tobytes() if self.refusals else b"",
        )


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
    lossless: bool  # False: what was accepted is not what the target would have said; counted apart
    train: bool  # False: the client opted out; counted, never trained on
    prompt_ids: bytes  # int32 [P]
    output_ids: bytes  # int32 [T]
    finish_reason: str
    rounds: tuple[Round, ...]
    teacher: TeacherRows
    time_to_first_token_ms: float
    total_ms: float
    resident_mb: float
    adjusted: bool = False  # penalties or a logit bias: the emitted tokens are not the target's own choices
    positions: str = "recorded"  # how the rounds' places are known: recorded, exact, exact_truncated, approx or none

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def exact(self) -> bool:
        """Whether every emitted token is the one that the target itself finds likeliest."""
        return self.greedy and self.lossless and not self.adjusted and not self.structured

    @property
    def policy(self) -> str:
        """The bucket of sampling settings under which acceptance is reported."""
        bucket = "greedy" if self.greedy else f"t{self.temperature:.1f}"
        return bucket if self.lossless else bucket + LOSSY

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt_ids, dtype="<i4")

    @property
    def output(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.output_ids, dtype="<i4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FeedbackRecord)
_SUMMARY = ("record_id", "tenant", "finished_at")


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


@dataclass(frozen=True)
class Summary:
    """Whose a record is, read without trusting the rest of it."""

    record_id: str
    tenant: str
    finished_at: float


def summary(data: bytes) -> Summary | None:
    """As much of an encoded record as tells whose it is, however broken the rest; None where not even that."""
    try:
        fields = dict(zip(FeedbackRecord.__struct_fields__, msgspec.msgpack.decode(data), strict=False))
        return msgspec.convert({name: fields.get(name) for name in _SUMMARY}, Summary, strict=True)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return None
