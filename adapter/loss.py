"""Losses over rows of log-probabilities: the target's top K, and a bucket for everything outside them.

Every loss is a function of (log p rows, log q rows) of shape [R, K + 1], the last column the bucket, and
gives one value a row. The bucket keeps the loss honest: over renormalised top-K rows the drafter's mass
elsewhere would cost nothing (osd.md 5.7).
"""

import torch
from torch import Tensor

FLOOR = -30.0  # of log q: keeps a loss finite where the drafter has no mass, and its gradient zero there
OUT_OF_SIGHT = -1e4  # a logit whose probability is zero in float32, finite so that gradients are


def drafter_rows(logits: Tensor, ids: Tensor) -> Tensor:
    """log q [R, K + 1] from logits [R, V_d] at the draft tokens `ids` [R, K]; the bucket is last.

    An id of -1 is a token outside the draft vocabulary: its column holds FLOOR, and belongs to no loss as
    the target's mass on it was moved to the bucket. The bucket is summed over its own tokens, and not taken
    as 1 minus the others, which float32 loses when they hold nearly all.
    """
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    absent = ids < 0
    inside = torch.zeros(len(logits), logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    inside.scatter_(-1, ids.masked_fill(absent, logits.shape[-1]), True)
    rest = logits.masked_fill(inside[:, :-1], OUT_OF_SIGHT).logsumexp(-1, keepdim=True)
    named = logits.gather(-1, ids.clamp_min(0)).masked_fill(absent, OUT_OF_SIGHT)
    return (torch.cat([named, rest], dim=-1) - total).clamp_min(FLOOR)


def target_rows(log_probs: Tensor, tail: Tensor, ids: Tensor) -> Tensor:
    """log p [R, K + 1] from logged log-probabilities [R, K] and log tail mass [R].

    Where `ids` [R, K] is -1 (a token outside the draft vocabulary) the mass moves to the bucket. Rows are
    normalised: float16 rounding of the log leaves their mass up to a percent off one.
    """
    absent = ids < 0
    moved = log_probs.masked_fill(~absent, -torch.inf)
    bucket = torch.cat([moved, tail[:, None]], dim=-1).logsumexp(-1, keepdim=True)
    rows = torch.cat([log_probs.masked_fill(absent, -torch.inf), bucket], dim=-1)
    return rows - rows.logsumexp(-1, keepdim=True)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) a row [R] = sum p (log p - log q); p is detached, the gradient in the logits q - p."""
    log_p = log_p.detach()
    p = log_p.exp()
    divergence: Tensor = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return divergence


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum(min(p, q)) a row [R]: the acceptance probability, over-stated by what meets within the bucket."""
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
