"""How much of what the target says can be proposed at all: the draft vocabulary's share of it.

Acceptance cannot rise above this share (osd.md 5.3). Learning does not move it: where it falls, traffic has left the
draft vocabulary, and only a drafter with another one helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from storage.records import FeedbackRecord


@dataclass(frozen=True)
class Coverage:
    """Shares from 0 to 1; None where nothing was there to be counted."""

    mass: float | None  # of the probability that the logged rows name
    tokens: float | None  # of the emitted tokens


def coverage(records: Sequence[FeedbackRecord], target_to_draft: Tensor) -> Coverage:
    """Over the teacher rows and the output tokens of `records`.

    The mass outside a row's top K cannot be told apart by token, so it counts on neither side.
    """
    inside = (target_to_draft >= 0).cpu().numpy()
    named = covered = 0.0
    emitted = proposable = 0
    for record in records:
        _, ids, log_probs, _ = record.teacher.arrays()
        p = np.exp(log_probs, dtype=np.float64)
        named, covered = named + float(p.sum()), covered + float(p[inside[ids]].sum())
        emitted, proposable = emitted + len(record.output), proposable + int(inside[record.output].sum())
    return Coverage(covered / named if named else None, proposable / emitted if emitted else None)
