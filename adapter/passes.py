"""The passes of a run: steps of AdamW over batches, the learning rate's course, and where to stop.

With examples set aside, their loss is taken after each pass; the weights of the best pass are the result, and the
run ends where it has not become better for some passes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapter import moments as carried
from adapter.batch import Batch, Example, collated, grouped
from adapter.drafters.causal_lm import CausalLM
from adapter.loss import LOSSES, LossName, drafter_rows
from adapter.moments import Moments

if TYPE_CHECKING:
    from adapter.distil import DistilConfig

APART = 16  # examples of one batch where no gradient is needed


class NotFinite(RuntimeError):
    """A loss, a gradient or a weight is no number any more."""


@dataclass
class Progress:
    """How far a run has come; also where it fails."""

    losses: list[float] = field(default_factory=list)  # of each step
    set_aside: list[float] = field(default_factory=list)  # before the first pass, and after each
    passes: int = 0


@dataclass(frozen=True)
class Task:
    """What is to be learnt, and from where on."""

    examples: Sequence[Example]
    set_aside: Sequence[Example]  # to stop by
    peak: float  # learning rate
    start: Moments | None  # of the optimiser


@dataclass(frozen=True)
class _Snapshot:
    """What a pass left: weights by name, and the optimiser's moments."""

    weights: dict[str, Tensor]
    moments: Moments


def learn(
    student: CausalLM, task: Task, config: "DistilConfig", progress: Progress, should_stop: Callable[[], None]
) -> Moments:
    """Train `student` in place; the optimiser's moments at the result. Raises `NotFinite`."""
    generator = torch.Generator().manual_seed(config.seed)
    plan = [grouped(task.examples, config.batch_tokens, generator, config.packing) for _ in range(config.epochs)]
    optimiser = torch.optim.AdamW(student.trainable(), lr=task.peak, weight_decay=config.weight_decay)
    if task.start is not None:
        carried.put(task.start, optimiser, student)
    steps = sum(map(len, plan))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, steps, config.warm_up))
    best = None
    progress.set_aside += [mean_loss(student, task.set_aside, config.loss)] if task.set_aside else []
    for groups in plan:
        for group in groups:
            should_stop()
            _step(student, optimiser, collated(group, config.packing), config, progress)
            schedule.step()
        progress.passes += 1
        if task.set_aside:
            progress.set_aside.append(mean_loss(student, task.set_aside, config.loss))
            since_best = progress.passes - _best_pass(progress)
            best = _snapshot(student, optimiser) if since_best == 0 else best
            if since_best >= config.patience:
                break
    if best is None:
        return carried.taken(optimiser, student)
    student.load_own(best.weights)
    return best.moments


def _best_pass(progress: Progress) -> int:
    """The pass after which the loss of what was set aside was least, the first of equals."""
    after = progress.set_aside[1:]
    return 1 + after.index(min(after))


def _snapshot(student: CausalLM, optimiser: torch.optim.AdamW) -> _Snapshot:
    weights = {name: tensor.detach().clone() for name, tensor in student.own_tensors().items()}
    return _Snapshot(weights, carried.taken(optimiser, student))


def _step(
    student: CausalLM, optimiser: torch.optim.AdamW, batch: Batch, config: "DistilConfig", progress: Progress
) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss = batch_loss(student, batch, config.loss)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(student.trainable(), config.clip)
    progress.losses.append(loss.item())
    if not (math.isfinite(progress.losses[-1]) and bool(torch.isfinite(norm))):
        raise NotFinite(f"loss or gradient is not finite at step {len(progress.losses)}")
    optimiser.step()


def batch_loss(drafter: CausalLM, batch: Batch, loss: LossName) -> Tensor:
    """Weighted mean loss over the batch's rows; the head is computed at the taught positions only."""
    values, weight = _row_losses(drafter, batch, loss)
    return (values * weight).sum() / weight.sum()


@torch.no_grad()
def mean_loss(drafter: CausalLM, examples: Sequence[Example], loss: LossName) -> float:
    """Weighted mean loss over the rows of all `examples`, of which there is one at least."""
    total = weight = 0.0
    for start in range(0, len(examples), APART):
        values, weights = _row_losses(drafter, collated(examples[start : start + APART]), loss)
        total, weight = total + float((values * weights).sum()), weight + float(weights.sum())
    return total / weight


def _row_losses(drafter: CausalLM, batch: Batch, loss: LossName) -> tuple[Tensor, Tensor]:
    """(loss [R], weight [R]) of a batch's rows."""
    device = drafter.head.weight.device
    positions = None if batch.positions is None else batch.positions.to(device)
    hidden = drafter.hidden(batch.tokens.to(device), positions).flatten(0, 1).index_select(0, batch.at.to(device))
    log_q = drafter_rows(drafter.logits(hidden), batch.ids.to(device))
    return LOSSES[loss](batch.log_p.to(device), log_q), batch.weight.to(device)


def rate(step: int, steps: int, warm_up: float) -> float:
    """Share of the peak learning rate at `step` of `steps`: a linear rise, then half a cosine down."""
    rise = max(1, round(steps * warm_up))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
