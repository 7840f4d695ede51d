"""An observed answer as the feedback record that the adapter learns from. Between reading and the feedback writer."""

import time
from dataclasses import dataclass
from typing import Final

from service.hosts.sidecar.asking import Asked
from service.hosts.sidecar.reading import Seen, teacher
from service.hosts.sidecar.rounds import Reconstruction, reconstruct
from service.origin import Origin, resident_mb
from storage.records import SCHEMA_VERSION, FeedbackRecord, Round, int32
from storage.validation import LONGEST_ID

SOURCE: Final = "sidecar"
ROWS: Final = 512  # teacher rows of one record at most


@dataclass(frozen=True)
class Sender:
    """Whose request it is, as its X-Redraft-* headers say."""

    workload: str = "default"
    tenant: str = "default"
    train: bool = True


@dataclass(frozen=True)
class Answered:
    """One observed request, from its headers to its last byte."""

    record_id: str
    sender: Sender
    asked: Asked
    began: float  # monotonic seconds
    first_byte: float
    ended: float
    version: int | None  # of the drafter that proposed; None: it was swapped midway, or nobody knows it


@dataclass(frozen=True)
class Told:
    """What is known of every request of one engine."""

    origin: Origin
    temperature: float  # of a request that names none
    top_k: int  # target probabilities of a teacher row
    lossless: bool


class Unusable(ValueError):
    """An answer that makes no record; the message is the reason that is counted."""


def record_of(answered: Answered, seen: Seen, told: Told) -> FeedbackRecord:
    """The record; raises `Unusable`."""
    asked, sender = answered.asked, answered.sender
    if not seen.prompt_ids or not seen.output:
        raise Unusable("no_token_ids")
    if seen.prompt_tokens not in (None, len(seen.prompt_ids)):
        raise Unusable("other_prompt")  # pictures, or a template that only the engine knows
    if not seen.complete:
        raise Unusable("tokens_missing")
    found = _rounds(answered, seen)
    temperature = told.temperature if asked.temperature is None else asked.temperature
    rows = _taught(found, len(seen.output), temperature == 0.0 and told.lossless, asked)
    kept = sender.train
    return FeedbackRecord(
        schema_version=SCHEMA_VERSION,
        record_id=answered.record_id,
        request_id=seen.answer_id if 0 < len(seen.answer_id) <= LONGEST_ID else answered.record_id,
        finished_at=time.time(),
        tenant=sender.tenant,
        workload=sender.workload,
        source=SOURCE,
        target_fingerprint=told.origin.target_fingerprint,
        tokenizer_fingerprint=told.origin.tokenizer_fingerprint,
        drafter=told.origin.drafter,
        temperature=temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        structured=asked.bound,
        lossless=told.lossless,
        train=kept,
        prompt_ids=int32(seen.prompt_ids if kept else [0] * len(seen.prompt_ids)),
        output_ids=int32(seen.output if kept else [0] * len(seen.output)),
        finish_reason=seen.finish_reason,
        rounds=_as_recorded(found, answered.version),
        teacher=teacher(seen, rows if kept else (), told.top_k),
        time_to_first_token_ms=max(answered.first_byte - answered.began, 0.0) * 1e3,
        total_ms=max(answered.ended - answered.began, 0.0) * 1e3,
        resident_mb=resident_mb(),
        adjusted=asked.adjusted,
        positions=found.grade,
    )


def _rounds(answered: Answered, seen: Seen) -> Reconstruction:
    if seen.steps is None or answered.version is None:
        return Reconstruction((), "none")
    return reconstruct(
        seen.steps, len(seen.output), answered.asked.bound, answered.asked.limit, len(seen.prompt_ids or ())
    )


def _as_recorded(found: Reconstruction, version: int | None) -> tuple[Round, ...]:
    """No engine tells which token was refused, with what probability, or how long a round took."""
    return tuple(
        Round(place.start, version or 0, place.proposed, place.accepted, -1, 0.0, 0.0, 0.0) for place in found.places
    )


def _taught(found: Reconstruction, length: int, own: bool, asked: Asked) -> list[int]:
    """The output positions whose rows are kept; `own`: each token is the target's likeliest, for certain.

    Those of the rejections; all but the first where it is not known which they are, of sampled requests, whose
    accepted tokens teach nothing by themselves, and of an engine that may be lossy, which only accepted tokens show.
    """
    if asked.bound:
        return []
    if own and found.exact and not asked.adjusted:
        return found.rejections[:ROWS]
    return list(range(1, length))[:ROWS]
