"""A finished generation as the feedback record that the adapter learns from. Between the engine and the writer."""

import time

import msgspec
import numpy as np

from service.engine.generation import Generation, TeacherRow, usage
from service.origin import Origin, resident_mb
from storage.records import SCHEMA_VERSION, FeedbackRecord, Round, TeacherRows, int32

SOURCE = "reference"


def record_of(generation: Generation, origin: Origin) -> FeedbackRecord:
    """The record of a finished request."""
    figures = usage(generation)
    rounds = figures.rounds if generation.train else tuple(map(_blanked, figures.rounds))
    return FeedbackRecord(
        schema_version=SCHEMA_VERSION,
        record_id=generation.request_id,
        request_id=generation.request_id,
        finished_at=time.time(),
        tenant=generation.tenant,
        workload=generation.workload,
        source=SOURCE,
        target_fingerprint=origin.target_fingerprint,
        tokenizer_fingerprint=origin.tokenizer_fingerprint,
        drafter=origin.drafter,
        temperature=generation.policy.temperature,
        top_p=generation.policy.top_p,
        top_k=generation.policy.top_k,
        structured=generation.constraint is not None,
        lossless=generation.lossless,
        train=generation.train,
        prompt_ids=_ids(generation, generation.prompt_ids),
        output_ids=_ids(generation, generation.output_ids),
        finish_reason=generation.finish_reason or "",
        rounds=rounds,
        teacher=teacher_rows(generation.teacher),
        time_to_first_token_ms=figures.time_to_first_token_ms,
        total_ms=figures.total_ms,
        resident_mb=resident_mb(),
        adjusted=generation.policy.adjusts,
    )


def _blanked(played: Round) -> Round:
    return msgspec.structs.replace(played, rejected_token=0 if played.rejected_token >= 0 else -1)


def _ids(generation: Generation, ids: list[int]) -> bytes:
    """The ids; of a client that opted out only how many, so that what it said never leaves this process."""
    return int32(ids if generation.train else [0] * len(ids))


def teacher_rows(rows: list[TeacherRow]) -> TeacherRows:
    """The rows in the wire format's arrays."""
    if not rows:
        return TeacherRows(0, b"", b"", b"", b"")
    return TeacherRows(
        top_k=len(rows[0].ids),
        positions=int32([row.position for row in rows]),
        ids=np.stack([row.ids for row in rows]).astype("<i4").tobytes(),
        log_probs=np.stack([row.log_probs for row in rows]).astype("<f2").tobytes(),
        tail_log_mass=np.array([row.tail_log_mass for row in rows], dtype="<f4").tobytes(),
        refusals=np.array([row.refusal for row in rows], dtype="<f4").tobytes(),
    )
