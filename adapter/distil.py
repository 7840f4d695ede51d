"""Distillation: a student from a parent drafter and the feedback of a window (OSD, arXiv 2310.07177).

Forward KL from the target's logged rows, at the positions where the drafter was refused and nowhere else.
No target is called: all that the teacher has to say is in the records. Seeded: the same parent, records and
settings give the same weights bit for bit on one machine with the same number of threads.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import structlog
import torch
from torch import Tensor

from adapter.batch import Batch, Example, batches, example
from adapter.drafters.causal_lm import CausalLM
from adapter.loss import drafter_rows, forward_kl
from storage.config import setting
from storage.decisions import TrainingReport
from storage.records import FeedbackRecord

log = structlog.get_logger()


@dataclass(frozen=True)
class DistilConfig:
    """How a drafter learns from a window."""

    learning_rate: float = setting(2e-3, "peak learning rate of AdamW")
    epochs: int = setting(2, "passes over a window")
    batch_tokens: int = setting(512, "tokens of one optimiser step, padding included")
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    clip: float = setting(1.0, "largest norm of a step's gradient")
    warm_up: float = setting(0.1, "share of the steps in which the learning rate rises; then it falls as a cosine")
    accepted_weight: float = setting(
        1.0, "weight of an accepted position against a refused one in the loss; 0: refused positions alone"
    )
    max_context: int = setting(32, "prompt tokens that training looks at, counted from the prompt's end")
    replay_windows: int = setting(2, "earlier windows that are trained on again, so that less is forgotten")
    seed: int = setting(0, "seed of the order of the records")


class TrainingFailed(RuntimeError):
    """Training ended without a usable student; the parent is as it was. `report` tells how far it came."""

    def __init__(self, report: TrainingReport) -> None:
        super().__init__(report.reason)
        self.report = report


@dataclass
class _Run:
    """How far a run has come."""

    config: DistilConfig
    records: int
    positions: int
    began: float
    losses: list[float]

    def report(self, reason: str = "") -> TrainingReport:
        """What the registry keeps; with a reason, the run has failed. A loss that is no number becomes -1."""
        first, last = (loss if math.isfinite(loss) else -1.0 for loss in self._ends())
        return TrainingReport(
            seed=self.config.seed,
            config=asdict(self.config),
            records=self.records,
            positions=self.positions,
            steps=len(self.losses),
            first_loss=first,
            last_loss=last,
            seconds=time.monotonic() - self.began,
            outcome="failed" if reason else "trained",
            reason=reason,
        )

    def _ends(self) -> tuple[float, float]:
        """Mean loss of the first and of the last tenth of the steps."""
        n = max(1, len(self.losses) // 10)
        first, last = self.losses[:n], self.losses[-n:]
        return (sum(first) / n, sum(last) / n) if self.losses else (0.0, 0.0)


def distil(
    parent: CausalLM,
    training: Sequence[FeedbackRecord],
    config: DistilConfig,
    should_stop: Callable[[], None] = lambda: None,
) -> tuple[CausalLM, TrainingReport]:
    """A student that starts as a copy of `parent` and has learnt from the records' teacher rows.

    `should_stop` is called before every step and ends the run by raising (a lost lease). Raises
    `TrainingFailed` where there is nothing to learn from, or a loss, gradient or weight is not finite.
    """
    examples = _examples(parent, training, config)
    positions = sum(len(e.at) for e in examples)
    run = _Run(config, len(training), positions, time.monotonic(), [])
    if not examples:
        raise TrainingFailed(run.report("no record has teacher rows: nothing was refused, or teacher_top_k is 0"))
    student = copy_of(parent)
    _train(student, examples, run, should_stop)
    if not all(bool(torch.isfinite(weight).all()) for weight in student.trainable()):
        raise TrainingFailed(run.report(f"weights are not finite after {len(run.losses)} steps"))
    report = run.report()
    log.info("distil.done", positions=positions, steps=report.steps, seconds=round(report.seconds, 1))
    return student, report


def copy_of(drafter: CausalLM) -> CausalLM:
    """A drafter with the same weights of its own, around the same frozen embedding."""
    twin = CausalLM(drafter.config, drafter.embedding)
    twin.load_own(drafter.own_tensors())
    return twin


def _examples(parent: CausalLM, training: Sequence[FeedbackRecord], config: DistilConfig) -> list[Example]:
    target_to_draft = parent.target_to_draft.cpu()
    found = (example(record, target_to_draft, config.max_context, config.accepted_weight) for record in training)
    return [e for e in found if e is not None]


def _train(student: CausalLM, examples: list[Example], run: _Run, should_stop: Callable[[], None]) -> None:
    """All passes; one optimiser step a batch."""
    config = run.config
    generator = torch.Generator().manual_seed(config.seed)
    plan = [b for _ in range(config.epochs) for b in batches(examples, config.batch_tokens, generator)]
    weights = student.trainable()
    optimiser = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, len(plan), config.warm_up))
    for batch in plan:
        should_stop()
        optimiser.zero_grad(set_to_none=True)
        loss = batch_loss(student, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights, config.clip)
        run.losses.append(loss.item())
        if not (math.isfinite(run.losses[-1]) and bool(torch.isfinite(norm))):
            raise TrainingFailed(run.report(f"loss or gradient is not finite at step {len(run.losses)}"))
        optimiser.step()
        schedule.step()


def batch_loss(drafter: CausalLM, batch: Batch) -> Tensor:
    """Weighted mean loss over the batch's rows; the head is computed at the taught positions only."""
    device = drafter.head.weight.device
    hidden = drafter.hidden(batch.tokens.to(device)).flatten(0, 1).index_select(0, batch.at.to(device))
    log_q = drafter_rows(drafter.logits(hidden), batch.ids.to(device))
    weight = batch.weight.to(device)
    return (forward_kl(batch.log_p.to(device), log_q) * weight).sum() / weight.sum()


def rate(step: int, steps: int, warm_up: float) -> float:
    """Share of the peak learning rate at `step` of `steps`: a linear rise, then half a cosine down."""
    rise = max(1, round(steps * warm_up))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
