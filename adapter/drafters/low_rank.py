"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): what frozen linear layers do, changed a little.

W x + s U D x, with D and U of a small rank and U zero at first, so that an adapted layer starts as the layer itself.
"""

from torch import Generator, Tensor, nn

SCALE = 16.0  # s: a window has few steps, of a size that suits whole weights
TINY = 1e-6  # padding has no size


class LowRank(nn.Module):
    """s U D x: [..., in] to [..., out]."""

    def __init__(self, size_in: int, size_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size_in, rank, bias=False)
        self.up = nn.Linear(rank, size_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x)) * SCALE
        return out


class Adapted(nn.Module):
    """A frozen linear layer, and what is added to it; `base` alone is the layer as it was."""

    base: nn.Module

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.adapter = LowRank(base.in_features, base.out_features, rank)
        self.adapter.to(dtype=base.weight.dtype, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.adapter(x)
        return out


def scaled(states: Tensor) -> tuple[Tensor, Tensor]:
    """The size of states [..., H], [..., 1], and the states divided by it."""
    size = (states.square().mean(-1, keepdim=True) + TINY).sqrt()
    return size, states / size


ADAPTER = ".adapter."  # in the names of what is added


def adapt(module: nn.Module, rank: int) -> None:
    """Put an adapter beside every linear layer in `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapted(child, rank))
        else:
            adapt(child, rank)


def start(module: nn.Module, generator: Generator) -> None:
    """Let all adapters in `module` add nothing at first: D is random, and U zero."""
    for child in module.modules():
        if isinstance(child, LowRank):
            width = child.down.in_features
            nn.init.normal_(child.down.weight, std=width**-0.5, generator=generator)
            nn.init.zeros_(child.up.weight)
