"""A chain proposed token by token, for a whole batch at once and for drafters of any kind (see `tree.grow`)."""

import torch
from torch import Tensor

from adapter.acceptance import Drawn
from adapter.drafters.protocol import DraftRow, Level, Proposal, Step
from adapter.processing import DraftVocabulary
from adapter.sampling import Sampler, choose, sampled_rows


def grow_chain(
    rows: list[DraftRow], length: int, vocabulary: DraftVocabulary, places: list[int], first: Tensor, step: Step
) -> Proposal:
    """`length` tokens a row, chosen as the target's are (adapter/sampling), from the drafter's logits."""
    chain, logits = _Chain([row.sampler for row in rows], vocabulary), first
    above = torch.zeros(len(rows), 1, dtype=torch.long, device=first.device)
    for depth in range(1, length + 1):
        tokens = chain.extend(logits)
        if depth < length:
            starts = [place + depth - 1 for place in places]
            logits = step(Level(depth, tokens[:, None], above, starts, None))[:, 0]
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
        rows = sampled_rows(self._samplers)
        q, taken = torch.stack(self._q, dim=1), torch.stack(self._taken, dim=1)
        return Proposal(self._tokens, (Drawn(self._tokens[rows], q, taken, self._vocabulary.to_target, tuple(rows)),))
