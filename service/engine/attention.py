"""Attention over slots for models whose query heads share key-value heads: nothing is copied for the sharing.

transformers repeats keys and values for every query head when there is a mask, which for a batch with long
memories costs more than the attention itself. Here the heads that share are laid side by side as queries.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "redraft_shared_heads"
STOCK = "sdpa"


def install(model: Any) -> None:
    """Let a model that runs on transformers' own SDPA attention run on this one; others stay as they are."""
    if model.config._attn_implementation == STOCK:
        model.set_attn_implementation(NAME)


def shared_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Query [B, H, n, d] over keys and values [B, H / g, m, d] under a mask [B, 1, n, m]: [B, n, H, d]."""
    batch, heads, width, dim = query.shape
    groups = heads // key.shape[1]
    unusual = any(kwargs.get(name) is not None for name in ("softcap", "position_bias"))
    if attention_mask is None or groups == 1 or unusual or attention_mask.shape[1] != 1:
        stock: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return stock
    side_by_side = query.reshape(batch, heads // groups, groups * width, dim)
    mask = attention_mask if width == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(side_by_side, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, width, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_heads)
AttentionMaskInterface.register(NAME, sdpa_mask)
