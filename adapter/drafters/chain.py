"""A chain proposed token by token by a drafter that is a language model of its own, for a whole batch at once."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapter.acceptance import Drawn
from adapter.drafters.protocol import DraftRow, KeyValues, Proposal
from adapter.processing import DraftVocabulary
from adapter.sampling import Sampler, choose, sampled_rows

if TYPE_CHECKING:
    from adapter.drafters.causal_lm import CausalLM

CHUNK = 512  # tokens absorbed in one forward where a row's memory is far behind


def propose_chain(drafter: "CausalLM", memory: KeyValues, rows: list[DraftRow]) -> Proposal:
    """Propose max(draft_length) tokens a row; row i of the batch owns slot i of `memory`.

    Chosen as the target's tokens are (adapter/sampling), from the drafter's logits and under each row's policy.
    """
    fed = [_absorb(drafter, memory, i, row) for i, row in enumerate(rows)]
    k = max(row.draft_length for row in rows)
    starts = [len(row.pending) + row.start for row in rows]
    samplers = [row.sampler for row in rows]
    vocabulary = DraftVocabulary(drafter.draft_to_target, drafter.target_to_draft)
    logits = _first_step(drafter, memory, rows, fed)
    chain = _Chain(samplers, vocabulary)
    for step in range(k):
        tokens = chain.extend(logits)
        if step + 1 < k:
            place = memory.begin([start + step for start in starts], 1)
            hidden = drafter.hidden(tokens[:, None], place.positions, place.mask, memory)
            logits = drafter.logits(hidden[:, -1])
    return chain.proposal()


class _Chain:
    """The tokens chosen so far [B, i], and what the sampled rows' were drawn from."""

    def __init__(self, samplers: list[Sampler], vocabulary: DraftVocabulary) -> None:
        self._samplers, self._vocabulary = samplers, vocabulary
        self._tokens = vocabulary.to_target.new_empty(len(samplers), 0)
        self._q: list[Tensor] = []
        self._taken: list[Tensor] = []

    def extend(self, logits: Tensor) -> Tensor:
        """Choose the next token a row [B] from the drafter's logits [B, V_d]."""
        chosen, q = choose(self._samplers, logits, self._tokens, self._vocabulary)
        if q is not None:
            self._q.append(q)
            self._taken.append(q.gather(1, chosen[sampled_rows(self._samplers), None])[:, 0])
        tokens = self._vocabulary.to_target[chosen]
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        return tokens

    def proposal(self) -> Proposal:
        if not self._q:
            return Proposal(self._tokens)
        tokens = self._tokens[sampled_rows(self._samplers)]
        q, taken = torch.stack(self._q, dim=1), torch.stack(self._taken, dim=1)
        return Proposal(self._tokens, Drawn(tokens, q, taken, self._vocabulary.to_target))


def _absorb(drafter: "CausalLM", memory: KeyValues, slot: int, row: DraftRow) -> int:
    """Bring a row's memory up to its last token where it is far behind; how many pending tokens were fed.

    Far behind is more than the two tokens of a fully accepted round: a new request, or a swap.
    """
    if len(row.pending) <= 2:
        return 0
    behind = row.pending[:-1]
    for at in range(0, len(behind), CHUNK):
        part = behind[at : at + CHUNK]
        place = memory.begin([row.start + at], len(part), first=slot)
        drafter.hidden(torch.tensor([part], device=place.positions.device), place.positions, place.mask, memory)
    return len(behind)


def _first_step(drafter: "CausalLM", memory: KeyValues, rows: list[DraftRow], fed: list[int]) -> Tensor:
    """Feed the one or two tokens left a row, padded on the right; the logits [B, V_d] after each row's last."""
    left = [row.pending[done:] for row, done in zip(rows, fed, strict=True)]
    width = max(len(tokens) for tokens in left)
    place = memory.begin([row.start + done for row, done in zip(rows, fed, strict=True)], width)
    device = place.positions.device
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in left], device=device)
    hidden = drafter.hidden(tokens, place.positions, place.mask, memory)
    last = torch.tensor([len(t) - 1 for t in left], device=device)
    return drafter.logits(hidden[torch.arange(len(rows), device=device), last])
