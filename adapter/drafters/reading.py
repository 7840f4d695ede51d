"""How a drafter that is a language model of its own reads a sequence and proposes after it, for a whole batch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapter.drafters.protocol import DraftRow, KeyValues, Level, Proposal, Shape
from adapter.drafters.tree import grow
from adapter.processing import DraftVocabulary

if TYPE_CHECKING:
    from adapter.drafters.causal_lm import CausalLM

CHUNK = 512  # tokens absorbed in one forward where a row's memory is far behind
SHORT = 2  # pending tokens of a row that has kept up, if its last round was a chain


def propose(drafter: "CausalLM", memory: KeyValues, rows: list[DraftRow], shape: Shape) -> Proposal:
    """A proposal after each row's last token; row i of the batch owns slot i of `memory`."""
    longest = max(SHORT, shape.depth + 1) if not shape.is_chain else SHORT
    fed = [_absorb(drafter, memory, i, row, longest) for i, row in enumerate(rows)]
    logits = _first_step(drafter, memory, rows, fed)
    places = [row.start + len(row.pending) for row in rows]

    def step(level: Level) -> Tensor:
        place = memory.begin(level.starts, level.tokens.shape[1], branches=level.branches)
        return drafter.logits(drafter.hidden(level.tokens, place.positions, place.mask, memory))

    return grow(rows, shape, DraftVocabulary(drafter.draft_to_target, drafter.target_to_draft), places, logits, step)


def _absorb(drafter: "CausalLM", memory: KeyValues, slot: int, row: DraftRow, longest: int) -> int:
    """Bring a row's memory up to its last token where it is far behind; how many pending tokens were fed.

    Far behind is more than an accepted round leaves: a new request, or a swap.
    """
    if len(row.pending) <= longest:
        return 0
    behind = row.pending[:-1]
    for at in range(0, len(behind), CHUNK):
        part = behind[at : at + CHUNK]
        place = memory.begin([row.start + at], len(part), first=slot)
        drafter.hidden(torch.tensor([part], device=place.positions.device), place.positions, place.mask, memory)
    return len(behind)


def _first_step(drafter: "CausalLM", memory: KeyValues, rows: list[DraftRow], fed: list[int]) -> Tensor:
    """Feed the few tokens left a row, padded on the right; the logits [B, V_d] after each row's last."""
    left = [row.pending[done:] for row, done in zip(rows, fed, strict=True)]
    width = max(len(tokens) for tokens in left)
    place = memory.begin([row.start + done for row, done in zip(rows, fed, strict=True)], width)
    device = place.positions.device
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in left], device=device)
    hidden = drafter.hidden(tokens, place.positions, place.mask, memory)
    last = torch.tensor([len(t) - 1 for t in left], device=device)
    return drafter.logits(hidden[torch.arange(len(rows), device=device), last])
