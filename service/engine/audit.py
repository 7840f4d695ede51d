"""Is speculative output the target's own? Two outputs of one greedy request, and what a difference means.

Floating point rounds differently for different batch shapes. Where two outputs part, the target's logits of
the two tokens must be a near-tie: nearer than the rounding of a pass. Anything else is a defect.
"""

from dataclasses import dataclass

import torch

from adapter.target import Target

# Relative rounding of one pass, in units of the dtype's epsilon times the largest logit: a stated bound.
ROUNDINGS = 16.0


@dataclass(frozen=True)
class Identity:
    """How an output compares with plain decoding of the same request."""

    verdict: str  # identical, near_tie, different
    position: int = -1  # output index of the first departure
    gap: float = 0.0  # between the target's logits of the two tokens there
    bound: float = 0.0


def compare(target: Target, prompt: list[int], plain: list[int], other: list[int]) -> Identity:
    """Hold `other` against `plain`, both greedy outputs of `prompt`; one target pass where they part."""
    if plain == other:
        return Identity("identical")
    both = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain), len(other)))
    if at >= min(len(plain), len(other)):
        return Identity("different", at)
    tokens = torch.tensor([prompt + plain[:at]], device=target.device)
    with torch.inference_mode():
        logits = target.model(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()
    gap = float((logits.max() - torch.minimum(logits[plain[at]], logits[other[at]])).item())
    bound = ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Identity("near_tie" if gap <= bound else "different", at, gap, bound)
