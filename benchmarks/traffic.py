"""Answers as traffic: what a server would have recorded, had a certain drafter proposed for them.

A greedy answer is the target's own whatever was proposed, so the rounds that any drafter plays over it follow from
one pass of the drafter. As in service, teacher rows are left where the drafter was refused and nowhere else.
"""

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from adapter.drafters.learnt import LearntDrafter
from adapter.replay import matches, rounds
from storage.records import FeedbackRecord, Round


@dataclass(frozen=True)
class Drafting:
    """Who proposes."""

    name: str
    version: int
    drafter: LearntDrafter
    k: int


@dataclass(frozen=True)
class Point:
    """One request as it was met: before anything was learnt from it."""

    version: int
    probability: float | None  # acceptance probability over its positions; None of an answer that is one token
    rounds: tuple[tuple[int, int], ...]  # (proposed, accepted)


def play(drafting: Drafting, answer: FeedbackRecord) -> tuple[FeedbackRecord, Point]:
    """The request's record, and how it went."""
    matched = matches(drafting.drafter, answer)
    played = rounds(matched, drafting.k)
    point = Point(drafting.version, _probability(matched), tuple(played))
    return _record(drafting, answer, played), point


def probability(drafter: LearntDrafter, answers: tuple[FeedbackRecord, ...]) -> float:
    """Acceptance probability, each request counting alike."""
    found = [p for answer in answers if (p := _probability(matches(drafter, answer))) is not None]
    return sum(found) / len(found) if found else 0.0


def _probability(matched: npt.NDArray[np.bool_]) -> float | None:
    """Of a greedy answer: the share of positions, but the first, where the drafter's choice is the target's."""
    return float(matched[1:].mean()) if len(matched) > 1 else None


def _record(drafting: Drafting, answer: FeedbackRecord, played: list[tuple[int, int]]) -> FeedbackRecord:
    found, start = [], 1
    for proposed, accepted in played:
        found.append(Round(start, drafting.version, proposed, accepted, -1, 1.0, 0.0, 0.0))
        start += accepted + 1
    refused = [r.start + r.accepted for r in found if r.accepted < r.proposed]
    return msgspec.structs.replace(
        answer,
        drafter=drafting.name,
        finished_at=time.time(),
        rounds=tuple(found),
        teacher=answer.teacher.at(refused),
    )
