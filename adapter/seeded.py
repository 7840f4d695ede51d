"""Common random numbers: what makes a seeded request's text the same with any drafter, draft length or batch.

The noise at an output position depends on the seed and the position alone, and the token is argmax(p / noise):
distributed as p, since the noise is exponential (Gumbel's trick). The drafter takes its argmax under the same
noise, so that a proposal is right exactly where it names the target's own token (Daliri et al., arXiv 2408.07978).
"""

import numpy as np
import torch
from torch import Tensor


class CommonNoise:
    """One request's noise E(seed, position) ~ Exp(1)^V, made when first asked for and kept while it may be again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._kept: dict[int, Tensor] = {}

    def at(self, positions: range, size: int, device: torch.device, over: int | None = None) -> Tensor:
        """The noise [n, V] of consecutive output positions; those before `over` (their first) are forgotten."""
        over = positions.start if over is None else over
        self._kept = {position: noise for position, noise in self._kept.items() if position >= over}
        for position in positions:
            if position not in self._kept:
                self._kept[position] = exponential(self._seed, position, size).to(device)
        return torch.stack([self._kept[position] for position in positions])


def exponential(seed: int, position: int, size: int) -> Tensor:
    """E(seed, position) [V]. Philox is keyed by both, so no two streams overlap.

    Drawn in float64: in float32 one number in eight million is 0, which at a vocabulary's size would let an
    arbitrary token win every few hundred positions.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)))
    return torch.from_numpy(generator.standard_exponential(size).astype(np.float32))
