"""Masks that are added to attention's scores: 0 where a token may attend, and the least number elsewhere."""

import torch
from torch import Tensor


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, n, m] from bool [B, n, m]: every layer would turn a boolean mask into this."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
