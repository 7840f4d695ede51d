"""An early exit: what the target will say, from a hidden state in the middle of its pass (arXiv 2402.11131, 2.3).

It ends in the target's own final norm and the draft tokens' rows of its head; what the layers in between would do is
learnt, as something of a low rank. A tree is pruned by it before the last layers (service/engine/pruning).
"""

import torch
from torch import Tensor, nn

from adapter.drafters import low_rank
from adapter.drafters.low_rank import scaled

NEVER = float("-inf")


class LowRankExit(nn.Module):
    """What is added to the state before norm and head."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.change = low_rank.LowRank(hidden, hidden, rank)

    def forward(self, states: Tensor) -> Tensor:
        """The states [..., H] as the last layers would leave them."""
        size, unit = scaled(states)
        ended: Tensor = states + size * self.change(unit)
        return ended


def chosen_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [B, n, m] of draft ids [B, m] by logits [B, n, V_d]; -inf for an id of -1."""
    logits = logits.float()
    chosen = logits.gather(2, ids.clamp_min(0)[:, None].expand(-1, logits.shape[1], -1))
    return (chosen - torch.logsumexp(logits, -1, keepdim=True)).masked_fill(ids[:, None] < 0, NEVER)
