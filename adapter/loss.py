"""Losses over rows of log-probabilities: the target's top K, and a bucket for everything outside them.

Every loss is a function of (log p rows, log q rows) of shape [R, K + 1], the last column the bucket, and
gives one value a row; p is never learnt, so it is detached. The bucket keeps the loss honest: over renormalised
top-K rows the drafter's mass elsewhere would cost nothing (osd.md 5.7). The gradients in the drafter's logits z,
where all tokens are named, stand beside each loss (osd.md 5.6); `alpha` is the row's acceptance probability.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

FLOOR = -30.0  # of log q: keeps a loss finite where the drafter has no mass, and its gradient zero there
OUT_OF_SIGHT = -1e4  # a logit whose probability is zero in float32, finite so that gradients are
SHARPNESS = 3.0  # of the hybrid: how soon a rising acceptance turns it from KL to TV (arXiv 2602.23881)


def drafter_rows(logits: Tensor, ids: Tensor) -> Tensor:
    """log q [R, K + 1] from logits [R, V_d] at the draft tokens `ids` [R, K]; the bucket is last.

    An id of -1 is a token outside the draft vocabulary: its column holds FLOOR, and belongs to no loss as
    the target's mass on it was moved to the bucket. The bucket is summed over its own tokens, and not taken
    as 1 minus the others, which float32 loses when they hold nearly all.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
    """KL(p || q) a row [R] = sum p (log p - log q). In z: q - p."""
    log_p = log_p.detach()
    p = log_p.exp()
    divergence: Tensor = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return divergence


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) a row [R] = sum q (log q - log p). In z: q (log q - log p - KL(q || p)).

    It is infinite wherever the target has no mass and the drafter has some, as on a row that is one emitted
    token: FLOOR bounds log p too, so that such mass costs 30 nats a unit.
    """
    divergence: Tensor = (log_q.exp() * (log_q - log_p.detach().clamp_min(FLOOR))).sum(-1)
    return divergence


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2 a row [R], m the mean of both; at most log 2.

    In z: q (log q/m - sum q log q/m) / 2.
    """
    log_p = log_p.detach()
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    p, q = log_p.exp(), log_q.exp()
    ours, theirs = (q * (log_q - log_m)).sum(-1), (torch.special.xlogy(p, p) - p * log_m).sum(-1)
    divergence: Tensor = 0.5 * (ours + theirs)
    return divergence


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - alpha a row [R]. In z: -q (1[q < p] - sum of q over the tokens where q < p)."""
    return 1.0 - overlap(log_p.detach(), log_q)


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log alpha a row [R]. In z: that of TV divided by alpha.

    Summed in logarithms, so that it has a gradient even where alpha is nearly nothing. Of a row that is one
    emitted token it is the forward KL.
    """
    log_alpha: Tensor = torch.minimum(log_p.detach(), log_q).logsumexp(-1)
    return -log_alpha


def lk_hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TV a row [R], with w = exp(-3 alpha) of the row itself, detached.

    KL leads where proposals are hardly accepted, as there TV has next to no gradient (arXiv 2602.23881).
    """
    variation = total_variation(log_p, log_q)
    w = torch.exp(-SHARPNESS * (1.0 - variation.detach()))
    return w * forward_kl(log_p, log_q) + (1.0 - w) * variation


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum(min(p, q)) a row [R]: the acceptance probability, over-stated by what meets within the bucket."""
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


LossName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "negative_log_acceptance", "lk_hybrid"]
LOSSES: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}
