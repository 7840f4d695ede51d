"""From the requests of an arm to its curve and figures, by workload."""

from collections.abc import Sequence
from dataclasses import dataclass

from adapter.acceptance import Acceptance
from benchmarks.answers import Segment
from benchmarks.traffic import Point

REACHED = 0.9  # of the ceiling

MEANINGS = {
    "arm": "frozen: version 1; osd: as published; osd_tuned: its positions with our rate and windows; redraft: the "
    "settings of this process; offline: for each workload a drafter trained on all of its traffic, with every teacher "
    "row, until early stopping",
    "ceiling": "acceptance probability of the offline drafter on the workload's held-out requests",
    "start": "mean over the first window of requests after the shift",
    "end": "mean over the last quarter of the segment",
    "start_length": "acceptance length at k over the same requests as start",
    "end_length": "acceptance length at k over the same requests as end",
    "requests_to_90": "requests after the shift until the moving mean stays at or above 90 % of the ceiling to the end "
    "of the segment; null: it never does",
    "first_at_90": "requests after the shift until it is there for the first time, with a whole window",
    "held_out_after": "acceptance probability on the workload's held-out requests at the end of its segment",
    "held_out_at_end": "the same at the end of the run",
    "forgotten": "held_out_after - held_out_at_end",
    "updates": "windows decided on in the segment",
    "promotions": "of these, promoted",
    "training_seconds": "time in training of the segment's updates",
    "curve": "moving mean of acceptance probability, a point a request, from the shift on; each request is met before "
    "anything is learnt from it, four at a time. Of the offline arm: its level",
    "length_curve": "acceptance length at k over the same moving window",
    "probabilities": "acceptance probability of each request; null: its answer is one token. Of the offline arm: "
    "its level",
}


@dataclass(frozen=True)
class Row:
    """One arm on one workload; see `MEANINGS`."""

    arm: str
    workload: str
    requests: int
    k: int
    ceiling: float | None
    start: float
    end: float
    start_length: float
    end_length: float
    requests_to_90: int | None
    first_at_90: int | None
    held_out_after: float
    held_out_at_end: float
    forgotten: float
    updates: int
    promotions: int
    training_seconds: float
    curve: tuple[float, ...]
    length_curve: tuple[float, ...]
    probabilities: tuple[float | None, ...]


@dataclass(frozen=True)
class Played:
    """What an arm did in one segment."""

    workload: str
    points: tuple[Point, ...]
    held_out_after: float
    held_out_at_end: float
    updates: int
    promotions: int
    training_seconds: float


def row_of(arm: str, played: Played, ceiling: float | None, window: int, k: int) -> Row:
    """An online arm's row."""
    points = played.points
    curve = moving_mean([p.probability for p in points], window)
    first, last = points[:window], points[-max(1, len(points) // 4) :]
    return Row(
        arm=arm,
        workload=played.workload,
        requests=len(points),
        k=k,
        ceiling=ceiling,
        start=_mean([p.probability for p in first]),
        end=_mean([p.probability for p in last]),
        start_length=_length(first),
        end_length=_length(last),
        requests_to_90=None if ceiling is None else stays_from(curve, REACHED * ceiling),
        first_at_90=None if ceiling is None else first_from(curve, REACHED * ceiling, window),
        held_out_after=played.held_out_after,
        held_out_at_end=played.held_out_at_end,
        forgotten=played.held_out_after - played.held_out_at_end,
        updates=played.updates,
        promotions=played.promotions,
        training_seconds=played.training_seconds,
        curve=curve,
        length_curve=tuple(_length(points[max(0, i + 1 - window) : i + 1]) for i in range(len(points))),
        probabilities=tuple(p.probability for p in points),
    )


def level_row(arm: str, part: Segment, k: int, level: float, length: float, seconds: float) -> Row:
    """The row of an arm that does not change: its level, as a curve."""
    requests = len(part.stream)
    return Row(
        arm=arm,
        workload=part.workload,
        requests=requests,
        k=k,
        ceiling=level,
        start=level,
        end=level,
        start_length=length,
        end_length=length,
        requests_to_90=0,
        first_at_90=0,
        held_out_after=level,
        held_out_at_end=level,
        forgotten=0.0,
        updates=0,
        promotions=0,
        training_seconds=seconds,
        curve=(level,) * requests,
        length_curve=(length,) * requests,
        probabilities=(level,) * requests,
    )


def moving_mean(values: Sequence[float | None], window: int) -> tuple[float, ...]:
    """Of the last `window` values at each, or of as many as there are; values that are None count for nothing."""
    return tuple(_mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values)))


def stays_from(curve: Sequence[float], level: float) -> int | None:
    """How many requests came before the curve was at the level for good; None where it is below at the end."""
    below = [i for i, value in enumerate(curve) if value < level]
    if not below:
        return 0
    return below[-1] + 1 if below[-1] + 1 < len(curve) else None


def first_from(curve: Sequence[float], level: float, window: int) -> int | None:
    """How many requests it took until the mean of a whole window was at the level."""
    return next((i + 1 for i, value in enumerate(curve) if i + 1 >= window and value >= level), None)


def _mean(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0


def _length(points: Sequence[Point]) -> float:
    return Acceptance.of([r for point in points for r in point.rounds]).length
