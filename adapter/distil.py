"""Distillation: a student from a parent drafter and the feedback of a window (OSD, arXiv 2310.07177).

No target is called: all that the teacher has to say is in the records, as logged rows and as emitted tokens, and for
drafters that are conditioned on hidden states in those that `adapter/rescore` read. Seeded: the same parent, lesson and
settings give the same weights bit for bit on one machine with the same number of threads.

The learning rate can follow how new a window is: it is multiplied by the parent's loss on the window divided by its
loss on the replayed records, within a factor of `novelty_range` either way.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256

import structlog
import torch
from torch import Tensor

from adapter.batch import Example, Positions, example
from adapter.coverage import coverage
from adapter.crew import ALONE, Crew
from adapter.drafters.learnt import LearntDrafter
from adapter.loss import LossName
from adapter.moments import Moments
from adapter.passes import NotFinite, Progress, Task, learn, mean_loss
from storage.config import setting
from storage.decisions import TrainingInputs, TrainingReport
from storage.records import FeedbackRecord

log = structlog.get_logger()


@dataclass(frozen=True)
class DistilConfig:
    """How a drafter learns from a window."""

    loss: LossName = setting(
        "forward_kl",
        "loss of a position, over the target's top K and its tail: `forward_kl`, `reverse_kl`, `jsd`, "
        "`total_variation`, `negative_log_acceptance` or `lk_hybrid`",
    )
    positions: Positions = setting(
        "verified",
        "positions that are trained on: `rejected` (those refused, as OSD is published), or `verified` (accepted and "
        "plainly decoded ones too)",
    )
    accepted_weight: float = setting(
        1.0, "weight in the loss of a verified position that was not refused, against one that was"
    )
    learning_rate: float = setting(2e-3, "peak learning rate of AdamW")
    novelty_range: float = setting(
        1.0,
        "largest factor by which the learning rate rises where the parent's loss on a window is above that on replayed "
        "records, and falls where it is below; 1: it stays",
    )
    epochs: int = setting(3, "passes over a window at most")
    stopping_share: float = setting(
        0.0, "share of the training requests, by hash of their id, set aside to stop at the best pass; 0: all are made"
    )
    patience: int = setting(1, "passes without a better loss on what is set aside that end a run")
    batch_tokens: int = setting(512, "tokens of one optimiser step, padding included")
    packing: bool = setting(
        False, "put sequences into one row instead of padding them; on a CPU it saves nothing, as lengths are alike"
    )
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    carry_moments: bool = setting(False, "start from the optimiser's moments of the parent's run, and keep this one's")
    clip: float = setting(1.0, "largest norm of a step's gradient")
    warm_up: float = setting(0.1, "share of the steps in which the learning rate rises; then it falls as a cosine")
    max_context: int = setting(32, "prompt tokens that training looks at, counted from the prompt's end")
    replay_records: int = setting(
        100, "earlier records that are trained on again with a window, workloads in equal shares; 0: none"
    )
    reservoir_records: int = setting(256, "earlier records of each workload that replayed ones are drawn from")
    reservoir_hours: float = setting(168.0, "age of a window at which its records are replayed no more")
    seed: int = setting(0, "seed of the order of the records, and of which are replayed")


@dataclass(frozen=True)
class Lesson:
    """What a run learns from."""

    window: Sequence[FeedbackRecord]
    replay: Sequence[FeedbackRecord] = ()  # of earlier windows
    moments: Moments | None = None  # of the optimiser, as the parent's run left them
    inputs: TrainingInputs | None = None  # where all of it comes from
    hidden: Mapping[str, Tensor] = field(default_factory=dict)  # by record_id: the target's states (adapter/rescore)


@dataclass(frozen=True)
class Distilled:
    """What a run made."""

    student: LearntDrafter
    report: TrainingReport
    moments: Moments  # of the optimiser at the student's weights


class TrainingFailed(RuntimeError):
    """Training ended without a usable student; the parent is as it was. `report` tells how far it came."""

    def __init__(self, report: TrainingReport) -> None:
        super().__init__(report.reason)
        self.report = report


@dataclass(frozen=True)
class _Material:
    """The lesson as examples."""

    window: list[Example]
    replay: list[Example]
    set_aside: list[Example]

    @property
    def trained(self) -> list[Example]:
        return [*self.replay, *self.window]


@dataclass
class _Run:
    """What a run reports on."""

    config: DistilConfig
    lesson: Lesson
    material: _Material
    parent: LearntDrafter
    novelty: float | None = None
    progress: Progress = field(default_factory=Progress)
    began: float = field(default_factory=time.monotonic)

    def report(self, reason: str = "") -> TrainingReport:
        """What the registry keeps; with a reason, the run has failed. A loss that is no number becomes -1."""
        steps, covered = self.progress.losses, coverage(self.lesson.window, self.parent.target_to_draft)
        first, last = _ends(steps)
        return TrainingReport(
            seed=self.config.seed,
            config=asdict(self.config),
            records=len(self.lesson.replay) + len(self.lesson.window),
            positions=sum(len(e.at) for e in self.material.trained),
            steps=len(steps),
            first_loss=_finite(first),
            last_loss=_finite(last),
            seconds=time.monotonic() - self.began,
            outcome="failed" if reason else "trained",
            reason=reason,
            inputs=self.lesson.inputs,
            replayed=len(self.lesson.replay),
            passes=self.progress.passes,
            set_aside_losses=tuple(map(_finite, self.progress.set_aside)),
            novelty=self.novelty,
            mass_covered=covered.mass,
            tokens_covered=covered.tokens,
        )


def distil(
    parent: LearntDrafter,
    lesson: Lesson,
    config: DistilConfig,
    should_stop: Callable[[], None] = lambda: None,
    crew: Crew = ALONE,
) -> Distilled:
    """A student that starts as a copy of `parent` and has learnt from the lesson's records.

    `should_stop` is called before every step and ends the run by raising (a lost lease). Raises
    `TrainingFailed` where there is nothing to learn from, or a loss, gradient or weight is not finite.
    """
    run = _Run(config, lesson, _material(parent, lesson, config), parent)
    if not run.material.trained:
        raise TrainingFailed(run.report(f"no record has {config.positions} positions to learn from: {NOTHING}"))
    run.novelty = _novelty(parent, run.material, config)
    peak = config.learning_rate * _factor(run.novelty, config)
    task = Task(run.material.trained, run.material.set_aside, peak, lesson.moments)
    student = parent.twin()
    try:
        moments = learn(student, task, config, run.progress, should_stop, crew)
    except NotFinite as problem:
        raise TrainingFailed(run.report(str(problem))) from problem
    report = run.report()
    if not all(bool(torch.isfinite(weight).all()) for weight in student.trainable()):
        raise TrainingFailed(run.report(f"weights are not finite after {report.steps} steps"))
    log.info("distil.done", positions=report.positions, steps=report.steps, seconds=round(report.seconds, 1))
    return Distilled(student, report, moments)


NOTHING = (
    "nothing was refused, no rows were logged (REDRAFT_TEACHER_TOP_K), hidden states that the drafter needs were not "
    "read, or all of it is set aside"
)


def is_set_aside(request_id: str, share: float) -> bool:
    """Whether a training request is kept from training, for early stopping: a fixed property of its id.

    Another hash than the holdout's, which has taken its own share before.
    """
    return int.from_bytes(sha256(f"stopping/{request_id}".encode()).digest()[:8]) < share * 2**64


def _material(parent: LearntDrafter, lesson: Lesson, config: DistilConfig) -> _Material:
    target_to_draft = parent.target_to_draft.cpu()
    material = _Material([], [], [])
    for part, records in ((material.replay, lesson.replay), (material.window, lesson.window)):
        for record in records:
            hidden = lesson.hidden.get(record.record_id) if parent.taps else None
            if parent.taps and hidden is None:
                continue  # the target did not read it again
            made = example(
                record, target_to_draft, config.max_context, config.positions, config.accepted_weight, hidden
            )
            if made is not None:
                (material.set_aside if is_set_aside(record.request_id, config.stopping_share) else part).append(made)
    return material


def _novelty(parent: LearntDrafter, material: _Material, config: DistilConfig) -> float | None:
    """The parent's loss on the window divided by its loss on replayed records; None where it is not asked for."""
    if config.novelty_range <= 1 or not material.window or not material.replay:
        return None
    new, old = (mean_loss(parent, examples, config.loss) for examples in (material.window, material.replay))
    return new / old if old > 0 and math.isfinite(new / old) else None


def _factor(novelty: float | None, config: DistilConfig) -> float:
    """What the learning rate is multiplied by."""
    if novelty is None:
        return 1.0
    return min(max(novelty, 1 / config.novelty_range), config.novelty_range)


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Mean loss of the first and of the last tenth of the steps."""
    n = max(1, len(losses) // 10)
    return (sum(losses[:n]) / n, sum(losses[-n:]) / n) if losses else (0.0, 0.0)


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else -1.0
