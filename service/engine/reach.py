"""Which remembered positions a token may attend to, by the kinds of attention layers that a decoder has."""

from typing import Any

import torch
from torch import Tensor

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

    def masks(self, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Of tokens at positions [B, n], over positions 0 to `end`: additive [B, 1, n, end], 0 where they may attend.

        Additive and not boolean, since every layer would turn a boolean one into this.
        """
        distance = positions[:, :, None] - torch.arange(end, device=self._device)
        full = self._additive(distance >= 0)
        if self._window is None or (self._kinds and SLIDING not in self._kinds):
            return full
        sliding = full if end <= self._window else self._additive((distance >= 0) & (distance < self._window))
        return {FULL: full, SLIDING: sliding} if self._kinds else sliding

    def _additive(self, allowed: Tensor) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, torch.finfo(self._dtype).min)[:, None]
