"""The measurement behind `redraft bench adapt`: the sharp-drift experiment of OSD on real prompts.

The workloads come one after the other as traffic. Each arm meets each request with what its drafter knows until
then, learns from the record as a worker would, and is held against the offline drafter of that workload.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from adapter.acceptance import Acceptance
from adapter.distil import Lesson, distil
from adapter.drafters.learnt import LearntDrafter
from adapter.drift import DriftConfig
from benchmarks import learning
from benchmarks.answers import Segment
from benchmarks.curve import MEANINGS, Played, Row, level_row, row_of
from benchmarks.experiment import Clock, Experiment, Say, Traffic
from benchmarks.learner import Learner
from benchmarks.machine import Machine, machine
from benchmarks.online import Noted, Online
from benchmarks.traffic import Drafting, play, probability
from worker.pipeline import AdaptConfig


@dataclass(frozen=True)
class AdaptSettings:
    """What is measured."""

    traffic: Traffic
    arms: tuple[str, ...]
    draft_length: int
    window: int  # requests of the moving mean
    warm_start: bool


@dataclass(frozen=True)
class Ours:
    """redraft's own settings of learning."""

    adapt: AdaptConfig
    drift: DriftConfig


@dataclass(frozen=True)
class AdaptReport:
    settings: AdaptSettings
    learning: dict[str, Any]  # by arm
    machine: Machine
    rows: tuple[Row, ...]
    updates: tuple[Noted, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "meanings": MEANINGS}


def measure(
    experiment: Experiment, settings: AdaptSettings, ours: Ours, redis_url: str, say: Say = lambda line: None
) -> AdaptReport:
    """All arms. The ceilings come first, as the others are held against them."""
    ours = replace(ours, adapt=_at_length(ours.adapt, settings.draft_length))
    learners = [arm for arm in settings.arms if arm != learning.FROZEN]
    clock = Clock(len(learners) * sum(len(part.stream) for part in experiment.segments), say)
    rows = _ceilings(experiment, settings, ours, clock) if learning.OFFLINE in settings.arms else []
    ceilings = {row.workload: row.end for row in rows}
    noted: list[Noted] = []
    for arm in settings.arms:
        if arm != learning.OFFLINE:
            found = _online(experiment, arm, settings, ours, redis_url, clock)
            rows += [row_of(arm, p, ceilings.get(p.workload), settings.window, settings.draft_length) for p in found[0]]
            noted += found[1]
            say(f"{arm}: {len(found[1])} updates, {sum(n.update.seconds for n in found[1]):.0f} s in them")
    rows.sort(key=lambda row: settings.arms.index(row.arm))
    return AdaptReport(settings, _configs(settings, ours), machine(experiment.target), tuple(rows), tuple(noted))


def _online(
    experiment: Experiment, arm: str, settings: AdaptSettings, ours: Ours, redis_url: str, clock: Clock
) -> tuple[list[Played], list[Noted]]:
    """One arm over all traffic, on a database, a stream and a weights store of its own."""
    step = clock.step if arm != learning.FROZEN else _no_step
    learner = Learner(arm.replace("/", "-"), experiment, learning.adapting(arm, ours.adapt), ours.drift, redis_url)
    try:
        online = Online(arm, learner, settings.draft_length, step)
        return online.run(experiment.segments), online.noted
    finally:
        learner.close()


def _ceilings(experiment: Experiment, settings: AdaptSettings, ours: Ours, clock: Clock) -> list[Row]:
    """The rows of the offline arm: a drafter of its own for each workload, trained on all of the traffic."""
    first, rows = experiment.drafter(), []
    for part in experiment.segments:
        made = distil(first, Lesson(part.stream), learning.offline(ours.adapt.distil))
        clock.step(len(part.stream), f"{learning.OFFLINE}: {part.workload}, {made.report.passes} passes")
        ceiling, length = probability(made.student, part.held_out), _length(made.student, part, settings.draft_length)
        rows.append(level_row(learning.OFFLINE, part, settings.draft_length, ceiling, length, made.report.seconds))
    return rows


def _length(drafter: LearntDrafter, part: Segment, k: int) -> float:
    """Acceptance length at k on the held-out requests."""
    drafting = Drafting(learning.OFFLINE, 1, drafter, k)
    return Acceptance.of([r for answer in part.held_out for r in play(drafting, answer)[1].rounds]).length


def _configs(settings: AdaptSettings, ours: Ours) -> dict[str, Any]:
    """The settings of each arm's updates."""
    online = [arm for arm in settings.arms if arm != learning.OFFLINE]
    configs: dict[str, Any] = {arm: asdict(learning.adapting(arm, ours.adapt)) for arm in online}
    if learning.OFFLINE in settings.arms:
        configs[learning.OFFLINE] = {"distil": asdict(learning.offline(ours.adapt.distil))}
    return configs


def _at_length(adapt: AdaptConfig, k: int) -> AdaptConfig:
    return replace(adapt, trigger=replace(adapt.trigger, draft_length=k))


def _no_step(count: int, line: str) -> None:
    """The frozen arm takes next to no time: it says nothing of the pace."""
