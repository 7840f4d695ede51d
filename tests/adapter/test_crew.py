"""Crews: parts of a batch come to the gradient of the whole of it, and no step is taken by some only."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from adapter.batch import Example, example, padded
from adapter.crew import Alone, part_of
from adapter.drafters.causal_lm import CausalLM
from adapter.passes import RowLosses, batch_loss
from adapter.target import Target
from storage.records import FeedbackRecord
from tests.adapter.feedback import served


@dataclass(frozen=True)
class One(Alone):
    """One of `size` processes, of which this test plays each in turn; what they sum is known beforehand."""

    rank: int = 0
    summed: float = 0.0

    def joined(self, losses: nn.Module) -> nn.Module:
        return losses

    def part(self, group: Sequence[Example]) -> Sequence[Example]:
        return part_of(group, self.rank, self.size)

    def total(self, value: Tensor) -> Tensor:
        return torch.tensor(self.summed)


@pytest.fixture(scope="module")
def drafter(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 1, torch.arange(200))


@pytest.fixture(scope="module")
def examples(drafter: CausalLM, answered: list[FeedbackRecord]) -> list[Example]:
    """Of several lengths; what was refused weighs twice as much as what was not."""
    made = [example(served(drafter, a), drafter.target_to_draft, 32, accepted_weight=0.5) for a in answered[:7]]
    return [e for e in made if e is not None]


def gradient(drafter: CausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, drafter.trainable()))


@pytest.mark.parametrize("size", [2, 3, 9])  # of 9, two have nothing to do
def test_the_average_over_processes_is_the_gradient_of_the_whole_batch(
    drafter: CausalLM, examples: list[Example], size: int
) -> None:
    losses, weight = RowLosses(drafter, "forward_kl"), float(sum(e.weight.sum() for e in examples))
    parts = []
    for rank in range(size):
        crew = One(size, rank, weight)
        parts.append(gradient(drafter, batch_loss(losses, padded(crew.part(examples)), crew)))
    averages = [torch.stack(of_one).mean(0) for of_one in zip(*parts, strict=True)]
    for average, alone in zip(averages, gradient(drafter, batch_loss(losses, padded(examples))), strict=True):
        torch.testing.assert_close(average, alone, rtol=1e-4, atol=1e-6)


def test_every_example_is_somebodys_and_nobody_is_idle(examples: list[Example]) -> None:
    parts = [part_of(examples, rank, 3) for rank in range(3)]
    assert sorted(id(e) for part in parts for e in part) == sorted(map(id, examples))
    idle = part_of(examples[:1], 2, 3)
    assert float(sum(e.weight.sum() for e in idle)) == 0.0
    assert len(idle) == 1
