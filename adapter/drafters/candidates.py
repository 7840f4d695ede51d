"""The likeliest tokens of several streams, kept in no more room than one hidden state takes."""

import torch
from torch import Tensor

UNLIKELY = -1e30  # a logit whose probability is zero, and finite
NUMBERS = 2  # a candidate: its draft id and its logit
WIDTH = 4  # bytes of a number: fp32 holds ids up to 2^24


def most(hidden: int, dtype: torch.dtype, streams: int) -> int:
    """How many candidates a stream fit into one hidden state; one at least."""
    return max(1, hidden * dtype.itemsize // (streams * NUMBERS * WIDTH))


def kept(logits: Tensor, count: int) -> Tensor:
    """Of logits [B, streams, V_d] the best `count` a stream: [B, streams x count x 2]."""
    best = logits.float().topk(min(count, logits.shape[-1]), dim=-1)
    return torch.stack([best.indices.float(), best.values], dim=-1).flatten(1)


def logits_of(state: Tensor, streams: int, draft_vocab: int) -> Tensor:
    """Logits [B, streams, V_d] that give what is not kept no probability."""
    pairs = state.view(len(state), streams, -1, NUMBERS)
    logits = torch.full((len(state), streams, draft_vocab), UNLIKELY, device=state.device)
    return logits.scatter_(2, pairs[..., 0].long(), pairs[..., 1])
