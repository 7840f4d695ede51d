"""The passes of a run: steps of AdamW over batches, the learning rate's course, and where to stop.

With examples set aside, their loss is taken after each pass; the weights of the best pass are the result, and the
run ends where it has not become better for some passes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adapter import moments as carried
from adapter.batch import Batch, Example, collated, grouped
from adapter.crew import ALONE, Crew, whole
from adapter.drafters.learnt import LearntDrafter
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
    student: LearntDrafter,
    task: Task,
    config: "DistilConfig",
    progress: Progress,
    should_stop: Callable[[], None],
    crew: Crew = ALONE,
) -> Moments:
    """Train `student` in place; the optimiser's moments at the result. Raises `NotFinite`.

    All of a `crew` train alike; each takes its part of every batch, and finds the same.
    """
    losses = crew.joined(RowLosses(student, config.loss))  # before the optimiser is made, as this may shard the weights
    generator = torch.Generator().manual_seed(config.seed)
    plan = [grouped(task.examples, config.batch_tokens, generator, config.packing) for _ in range(config.epochs)]
    optimiser = torch.optim.AdamW(student.trainable(), lr=task.peak, weight_decay=config.weight_decay)
    if task.start is not None:
        carried.put(task.start, optimiser, student)
    steps = sum(map(len, plan))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, steps, config.warm_up))
    best = None
    progress.set_aside += [_mean_loss(losses, task.set_aside)] if task.set_aside else []
    for groups in plan:
        for group in groups:
            should_stop()
            _step(losses, optimiser, group, config, progress, crew)
            schedule.step()
        progress.passes += 1
        if task.set_aside:
            progress.set_aside.append(_mean_loss(losses, task.set_aside))
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


def _snapshot(student: LearntDrafter, optimiser: torch.optim.AdamW) -> _Snapshot:
    weights = {name: tensor.detach().clone() for name, tensor in student.own_tensors().items()}
    return _Snapshot(weights, carried.taken(optimiser, student))


def _step(
    losses: nn.Module,
    optimiser: torch.optim.AdamW,
    group: Sequence[Example],
    config: "DistilConfig",
    progress: Progress,
    crew: Crew,
) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss = batch_loss(losses, collated(crew.part(group), config.packing), crew)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = whole(torch.nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], config.clip))
    progress.losses.append(crew.total(loss).item() / crew.size)
    if not (math.isfinite(progress.losses[-1]) and bool(torch.isfinite(norm))):
        raise NotFinite(f"loss or gradient is not finite at step {len(progress.losses)}")
    optimiser.step()


def batch_loss(losses: nn.Module, batch: Batch, crew: Crew = ALONE) -> Tensor:
    """Weighted mean loss over the rows of the crew's batch, of which `batch` is one part (adapter/crew)."""
    values, weight = losses(batch)
    loss: Tensor = (values * weight).sum() * crew.size / crew.total(weight.sum())
    return loss


def mean_loss(drafter: LearntDrafter, examples: Sequence[Example], loss: LossName) -> float:
    """Weighted mean loss over the rows of all `examples`, of which there is one at least."""
    return _mean_loss(RowLosses(drafter, loss), examples)


@torch.no_grad()
def _mean_loss(losses: nn.Module, examples: Sequence[Example]) -> float:
    total = weight = 0.0
    for start in range(0, len(examples), APART):
        values, weights = losses(collated(examples[start : start + APART]))
        total, weight = total + float((values * weights).sum()), weight + float(weights.sum())
    return total / weight


class RowLosses(nn.Module):
    """A drafter's losses on a batch's rows as a module, which is what PyTorch can distribute.

    Every depth of the drafter learns every row that it can predict: the row of a token is taught to depth j at the
    index that lies j before the token's own, and weighs depth_decay^j. The head is computed at the taught positions
    only.
    """

    def __init__(self, drafter: LearntDrafter, loss: LossName) -> None:
        super().__init__()
        self.drafter, self._loss = drafter, LOSSES[loss]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss [R'], weight [R']), the rows of depth 0 first, and those of an early exit last."""
        drafter, device = self.drafter, self.drafter.draft_to_target.device
        tokens = batch.tokens.to(device)
        positions = None if batch.positions is None else batch.positions.to(device)
        hidden = None if batch.hidden is None else batch.hidden.to(device)
        values, weights = [], []
        for depth, states in enumerate(drafter.unrolled(tokens, hidden, positions, drafter.depths)):
            rows = _predictable(batch, depth, bool(drafter.taps))
            taught = states.flatten(0, 1).index_select(0, (batch.at[rows] - depth).to(device))
            log_q = drafter_rows(drafter.logits(taught, depth), batch.ids[rows].to(device))
            values.append(self._loss(batch.log_p[rows].to(device), log_q))
            weights.append(batch.weight[rows].to(device) * drafter.depth_decay**depth)
        exits = None if hidden is None else drafter.exit_states(hidden)
        if exits is not None:  # says the next token, as the target's own head does
            log_q = drafter_rows(drafter.logits(exits.flatten(0, 1)[batch.at.to(device)]), batch.ids.to(device))
            values.append(self._loss(batch.log_p.to(device), log_q))
            weights.append(batch.weight.to(device))
        return torch.cat(values), torch.cat(weights)


def _predictable(batch: Batch, depth: int, conditioned: bool) -> Tensor:
    """The rows, by number, whose tokens can be said that early: a state of the token before may be needed too."""
    return (batch.before >= depth + conditioned).nonzero()[:, 0]


def rate(step: int, steps: int, warm_up: float) -> float:
    """Share of the peak learning rate at `step` of `steps`: a linear rise, then half a cosine down."""
    rise = max(1, round(steps * warm_up))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
