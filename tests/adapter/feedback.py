"""Feedback as a server would leave it: the rounds that a drafter plays over an answer, rows where it was refused."""

import msgspec
import numpy as np

from adapter.drafters.causal_lm import CausalLM
from adapter.replay import matches, rounds
from storage.records import FeedbackRecord, Round, TeacherRows


def kept_rows(teacher: TeacherRows, positions: list[int]) -> TeacherRows:
    """The teacher rows at some of their output positions."""
    all_positions, ids, log_probs, tail = teacher.arrays()
    at = np.flatnonzero(np.isin(all_positions, positions))
    return TeacherRows(
        top_k=teacher.top_k,
        positions=all_positions[at].tobytes(),
        ids=ids[at].tobytes(),
        log_probs=log_probs[at].astype("<f2").tobytes(),
        tail_log_mass=tail[at].tobytes(),
    )


def refusals(answer: FeedbackRecord, positions: list[int]) -> FeedbackRecord:
    """The record of a request that was refused at these output positions, one round of one proposal each."""
    played = tuple(Round(int(position), 1, 1, 0, -1, 0.0, 1.0, 1.0) for position in positions)
    return msgspec.structs.replace(answer, rounds=played, teacher=kept_rows(answer.teacher, positions))


def served(drafter: CausalLM, answer: FeedbackRecord, k: int = 4, **changes: object) -> FeedbackRecord:
    """The record of a request that `drafter` was proposing for; `changes` replace fields of it."""
    played, start = [], 1
    for proposed, accepted in rounds(matches(drafter, answer), k):
        played.append(Round(start, 1, proposed, accepted, -1, 0.0, 1.0, 1.0))
        start += accepted + 1
    refused = [r.start + r.accepted for r in played if r.accepted < r.proposed]
    record = msgspec.structs.replace(answer, rounds=tuple(played), teacher=kept_rows(answer.teacher, refused))
    return msgspec.structs.replace(record, **changes)
