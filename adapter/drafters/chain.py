"""A chain proposed token by token by a drafter that is a language model of its own, for a whole batch at once."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapter.acceptance import distribution
from adapter.drafters.protocol import DraftRow, KeyValues, Proposal

if TYPE_CHECKING:
    from adapter.drafters.causal_lm import CausalLM

CHUNK = 512  # tokens absorbed in one forward where a row's memory is far behind


def propose_chain(drafter: "CausalLM", memory: KeyValues, rows: list[DraftRow]) -> Proposal:
    """Propose max(draft_length) tokens a row; row i of the batch owns slot i of `memory`.

    Greedy rows take the argmax. Sampled rows draw from q = the drafter's logits under the row's own policy,
    and that same q is returned: the ratio test needs exactly what was sampled from (osd.md 5.3).
    """
    fed = [_absorb(drafter, memory, i, row) for i, row in enumerate(rows)]
    k = max(row.draft_length for row in rows)
    starts = [len(row.pending) + row.start for row in rows]
    logits = _first_step(drafter, memory, rows, fed)
    choices, draws = [], [_Draws(row, drafter.draft_to_target, k, drafter.vocab_size) for row in rows]
    for step in range(k):
        chosen = logits.argmax(-1)
        for i, row_draws in enumerate(draws):
            row_draws.take(step, logits[i], chosen, i)
        choices.append(drafter.draft_to_target[chosen])
        if step + 1 < k:
            place = memory.begin([start + step for start in starts], 1)
            hidden = drafter.hidden(choices[-1][:, None], place.positions, place.mask, memory)
            logits = drafter.logits(hidden[:, -1])
    return Proposal(torch.stack(choices, dim=1), [d.q for d in draws])


class _Draws:
    """The sampled choices of one row, and the q [draft_length, V] that they were drawn from."""

    def __init__(self, row: DraftRow, draft_to_target: Tensor, k: int, vocab_size: int) -> None:
        self._row, self._draft_to_target = row, draft_to_target
        sampled = not row.policy.greedy and row.draft_length > 0
        self.q = torch.zeros(row.draft_length, vocab_size) if sampled else None

    def take(self, step: int, logits: Tensor, chosen: Tensor, i: int) -> None:
        """Replace the argmax at chosen[i] by a draw, where this row samples and still proposes."""
        if self.q is None or step >= self._row.draft_length:
            return
        probs = distribution(logits, self._row.policy).cpu()
        self.q[step, self._draft_to_target.cpu()] = probs
        chosen[i] = torch.multinomial(probs, 1, generator=self._row.generator)[0]


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
