"""A drafter's first proposal, made before it serves anybody, so that no round pays for what is done but once.

Run by `Engine.swap` on the drafter as it will serve (its head packed), in the thread of who asked for the swap.
"""

from dataclasses import replace

import torch

from adapter.drafters.protocol import Drafter, DraftRow, FollowRow, Shape
from adapter.policy import Policy
from adapter.sampling import Sampler
from adapter.target import Target
from service.engine.slots import Slots

PROMPT = 8  # tokens
GREEDY = Policy(temperature=0.0)


@torch.inference_mode()
def warm_up(drafter: Drafter, target: Target, shape: Shape) -> int:
    """Let the drafter propose once; the bytes that one position of one of its slots takes, 0 without any.

    The target's passes go on meanwhile, so it is not asked for hidden states: zeros will do.
    """
    slots = None if drafter.decoder is None or drafter.rides else Slots(drafter.decoder, 1, PROMPT + shape.places + 2)
    row = DraftRow([0] * PROMPT, 0, shape.depth, Sampler(GREEDY, [0] * PROMPT, []))
    if drafter.taps:
        read = drafter.depths if drafter.rides else len(drafter.taps)
        size = target.model.config.get_text_config().hidden_size * read
        hidden = torch.zeros(1, PROMPT, size, dtype=target.dtype, device=target.device)
        state = drafter.follow(slots, [FollowRow(0, [0] * PROMPT)], hidden)[0]
        row = replace(row, pending=[0], start=PROMPT, state=state)
    drafter.propose(slots, [row], shape)
    return 0 if slots is None else slots.position_bytes
