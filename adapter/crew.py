"""The processes that make one run of training together, as its steps see them; in most runs it is one.

All of them make the same plan of batches from the same records, and each takes its part of every batch. PyTorch
averages the gradients that they come to. A part's loss is therefore divided by the weight of the *whole* batch, and
multiplied by the number of processes: the average is then the gradient that one process would have found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adapter.batch import Example


class Crew(Protocol):
    """What a process must know of the others."""

    @property
    def size(self) -> int:
        """How many they are."""

    def joined(self, losses: nn.Module) -> nn.Module:
        """The module to compute losses by, so that backward leaves the average gradient; `losses` may change."""

    def part(self, group: Sequence[Example]) -> Sequence[Example]:
        """This process's examples of a batch, one at least."""

    def total(self, value: Tensor) -> Tensor:
        """The sum of everybody's value, without a gradient."""


@dataclass(frozen=True)
class Alone:
    """One process."""

    size: int = 1

    def joined(self, losses: nn.Module) -> nn.Module:
        return losses

    def part(self, group: Sequence[Example]) -> Sequence[Example]:
        return group

    def total(self, value: Tensor) -> Tensor:
        return value.detach()


ALONE = Alone()


def part_of(group: Sequence[Example], rank: int, size: int) -> list[Example]:
    """Every `size`-th example; where there are too few, one that weighs nothing, as everybody must take the step."""
    own = list(group[rank::size])
    return own or [replace(group[0], weight=torch.zeros_like(group[0].weight))]


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every process may hold a shard, put together; the same one where it is not sharded."""
    gather: Any = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in the dtype, the place, and the shards of another."""
    mesh: Any = getattr(like, "device_mesh", None)
    moved = tensor.to(dtype=like.dtype, device=like.device)
    if mesh is None:
        return moved
    from torch.distributed.tensor import distribute_tensor

    placements: Any = getattr(like, "placements", None)
    return distribute_tensor(moved, mesh, placements)
