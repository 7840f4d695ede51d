"""Crews of several processes (adapter/crew): each with a copy of the drafter, or with its shards of one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adapter.batch import Example
from adapter.crew import part_of


@dataclass(frozen=True)
class Copies:
    """Every process has the whole drafter (DDP)."""

    rank: int
    size: int

    def joined(self, losses: nn.Module) -> nn.Module:
        # Of a drafter with several depths a batch may leave some without a row, and so without a gradient.
        depths: int = losses.drafter.depths  # type: ignore[union-attr, assignment]
        return DistributedDataParallel(losses, broadcast_buffers=False, find_unused_parameters=depths > 1)

    def part(self, group: Sequence[Example]) -> Sequence[Example]:
        return part_of(group, self.rank, self.size)

    def total(self, value: Tensor) -> Tensor:
        """Summed where it lies, in the same order for everybody."""
        summed = value.detach().clone()
        distributed.all_reduce(summed)
        return summed


@dataclass(frozen=True)
class Shards(Copies):
    """Every process has its share of each weight and of the optimiser's state (FSDP2).

    A layer is put together when its turn comes.
    """

    def joined(self, losses: nn.Module) -> nn.Module:
        frozen = {weight for weight in losses.parameters() if not weight.requires_grad}
        drafter: nn.Module = losses.drafter  # type: ignore[assignment]
        for layer in getattr(drafter.decoder, "layers", ()):
            fully_shard(layer, ignored_params=frozen)
        fully_shard(losses, ignored_params=frozen)
        return losses
