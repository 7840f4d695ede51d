"""Which remembered places a token may attend to, by the kinds of attention layers that a decoder has.

A token's place is its position, but in a tree: there its position tells how deep it stands.
"""

from typing import Any

import torch
from torch import Tensor

from adapter.drafters.protocol import Branches
from adapter.masks import additive

FULL, SLIDING = "full_attention", "sliding_attention"


class NotServed(ValueError):
    """A decoder whose layers keep something else than keys and values."""


class Reach:
    """Masks for a decoder: one for all of its layers, or one for each kind where its configuration lists kinds."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._kinds = frozenset(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._device, self._dtype = device, dtype
        if strange := self._kinds - {FULL, SLIDING}:
            raise NotServed(f"layers of {', '.join(sorted(strange))} are not served: use a target with plain attention")

    def masks(
        self, positions: Tensor, end: int, gaps: Tensor | None = None, branches: Branches | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Of tokens at positions [B, n], over places 0 to `end`: additive [B, 1, n, end], 0 where they may attend.

        gaps [B, 2]: the places from the first up to the second hold nothing.
        """
        places = torch.arange(end, device=self._device)
        if branches is None:
            distance = positions[:, :, None] - places
            allowed = distance >= 0
        else:
            distance, allowed = _in_tree(positions, places, branches)
        if gaps is not None:
            allowed = allowed & ((places < gaps[:, :1]) | (places >= gaps[:, 1:]))[:, None]
        full = additive(allowed, self._dtype)
        if self._window is None or (self._kinds and SLIDING not in self._kinds):
            return full
        sliding = full if end <= self._window else additive(allowed & (distance < self._window), self._dtype)
        return {FULL: full, SLIDING: sliding} if self._kinds else sliding


def _in_tree(positions: Tensor, places: Tensor, branches: Branches) -> tuple[Tensor, Tensor]:
    """How far behind each place [B, n, end] stands, and whether a token of the tree sees it."""
    roots = torch.tensor(branches.roots, device=positions.device)[:, None]
    count = branches.depths.shape[1]
    within = places - roots  # [B, end]: which token of the tree, below 0 for what stands before it
    token = within.clamp(0, count - 1)
    theirs = torch.where(within < 0, places, roots + branches.depths.gather(1, token))
    ancestor = branches.sees.gather(2, token[:, None].expand(-1, positions.shape[1], -1))
    allowed = (within < 0)[:, None] | (ancestor & (within < count)[:, None])
    return positions[:, :, None] - theirs[:, None], allowed
