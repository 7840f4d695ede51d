"""The measurement behind `redraft bench grid`: every loss on every choice of positions, by workload.

Version 1 serves all of a workload's traffic; from the same records each cell distils one student, and all students
meet the same held-out requests.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapter.batch import Positions
from adapter.distil import DistilConfig, Lesson, TrainingFailed, distil
from adapter.drafters.learnt import LearntDrafter
from adapter.loss import LossName
from adapter.replay import evaluate
from benchmarks.answers import Segment
from benchmarks.experiment import Clock, Experiment, Say, Traffic
from benchmarks.machine import Machine, machine
from benchmarks.traffic import Drafting, play
from storage.records import FeedbackRecord

OVERALL = "all"


@dataclass(frozen=True)
class GridSettings:
    """What is measured."""

    traffic: Traffic
    losses: tuple[LossName, ...]
    positions: tuple[Positions, ...]
    draft_length: int
    warm_start: bool


@dataclass(frozen=True)
class Cell:
    """One student on the held-out requests of its workload, against version 1 on the same ones."""

    loss: str
    positions: str
    workload: str
    requests: int  # held out
    before: float  # acceptance probability over positions, of version 1
    probability: float
    gain: float
    gain_low: float
    gain_high: float
    length: float  # acceptance length at k
    training_seconds: float
    failed: str = ""  # why there is no student; the figures are then version 1's


@dataclass(frozen=True)
class GridReport:
    settings: GridSettings
    distil: DistilConfig  # all else that the students have in common
    machine: Machine
    rows: tuple[Cell, ...]
    winners: dict[str, str]  # by workload, and over all: LOSS/POSITIONS

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    experiment: Experiment, settings: GridSettings, config: DistilConfig, say: Say = lambda line: None
) -> GridReport:
    """The whole table."""
    first = experiment.drafter()
    ways = [(loss, positions) for loss in settings.losses for positions in settings.positions]
    clock, rows = Clock(len(ways) * len(experiment.segments), say), []
    for part in experiment.segments:
        drafting = Drafting("grid", 1, first, settings.draft_length)
        served = [play(drafting, answer)[0] for answer in part.stream]
        for loss, positions in ways:
            rows.append(_cell(first, served, part, replace(config, loss=loss, positions=positions), settings))
            clock.step(1, f"{part.workload}: {loss}/{positions} {rows[-1].probability:.3f}")
    return GridReport(settings, config, machine(experiment.target), tuple(rows), winners(rows))


def _cell(
    first: LearntDrafter, served: Sequence[FeedbackRecord], part: Segment, config: DistilConfig, settings: GridSettings
) -> Cell:
    student, seconds, failed = first, 0.0, ""
    try:
        made = distil(first, Lesson(served), config)
        student, seconds = made.student, made.report.seconds
    except TrainingFailed as failure:
        failed = str(failure)
    score = evaluate(student, first, part.held_out, settings.draft_length).overall
    return Cell(
        loss=config.loss,
        positions=config.positions,
        workload=part.workload,
        requests=score.requests,
        before=score.parent_probability,
        probability=score.candidate_probability,
        gain=score.gain,
        gain_low=score.gain_low,
        gain_high=score.gain_high,
        length=score.candidate_length,
        training_seconds=seconds,
        failed=failed,
    )


def winners(rows: Sequence[Cell]) -> dict[str, str]:
    """The best by workload, and by the mean over the workloads."""
    by_way: dict[str, dict[str, float]] = {}
    for row in rows:
        by_way.setdefault(f"{row.loss}/{row.positions}", {})[row.workload] = row.probability
    workloads = list(dict.fromkeys(row.workload for row in rows))
    found = {w: max(by_way, key=lambda way: by_way[way][w]) for w in workloads}
    found[OVERALL] = max(by_way, key=lambda way: sum(by_way[way].values()))
    return found
