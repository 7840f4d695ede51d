"""Feedback as a server would leave it: the rounds that a drafter plays over an answer, rows where it was refused."""

import msgspec

from adapter.drafters.causal_lm import CausalLM
from adapter.replay import matches, rounds
from storage.records import FeedbackRecord, Round


def refusals(answer: FeedbackRecord, positions: list[int]) -> FeedbackRecord:
    """The record of a request that was refused at these output positions, one round of one proposal each."""
    played = tuple(Round(int(position), 1, 1, 0, -1, 0.0, 1.0, 1.0) for position in positions)
    return msgspec.structs.replace(answer, rounds=played, teacher=answer.teacher.at(positions))


def served(drafter: CausalLM, answer: FeedbackRecord, k: int = 4, **changes: object) -> FeedbackRecord:
    """The record of a request that `drafter` was proposing for; `changes` replace fields of it."""
    played, start = [], 1
    for proposed, accepted in rounds(matches(drafter, answer), k):
        played.append(Round(start, 1, proposed, accepted, -1, 0.0, 1.0, 1.0))
        start += accepted + 1
    refused = [r.start + r.accepted for r in played if r.accepted < r.proposed]
    record = msgspec.structs.replace(answer, rounds=tuple(played), teacher=answer.teacher.at(refused))
    return msgspec.structs.replace(record, **changes)
