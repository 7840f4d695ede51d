"""One round over the rows that decode: propose, verify, accept. Nothing here knows of queues, text or clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from adapter.drafters.protocol import Proposal
from adapter.target import Target
from service.engine.accept import Outcome, accept
from service.engine.generation import Row
from service.engine.proposing import nothing, propose
from service.engine.residents import Residents
from service.engine.slots import Slots


@dataclass(frozen=True)
class RoundResult:
    outcomes: list[Outcome]
    width: int  # tokens proposed for the row with most; the pass was over one more for every row
    draft_ms: float
    verify_ms: float
    absorbed: int  # earlier tokens that drafters caught up on


def read_prompt(target: Target, slots: Slots, slot: int, row: Row, most: int) -> Tensor | None:
    """Read up to `most` further prompt tokens into a slot; after the last one its logits [1, 1, V]."""
    start = row.target_length
    part = row.sequence[start : start + most]
    place = slots.begin([start], len(part), first=slot)
    logits: Tensor = target.model(
        input_ids=torch.tensor([part], device=target.device),
        position_ids=place.positions,
        attention_mask=place.mask,
        cache=slots,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    row.target_length = start + len(part)
    return logits if row.target_length == len(row.sequence) else None


def first_token(target: Target, row: Row, logits: Tensor, top_k: int) -> Outcome:
    """What follows a prompt: a round without a proposal, on the logits [1, 1, V] after the prompt."""
    return accept([row], [0], nothing(target, 1), logits, top_k)[0]


def verify(target: Target, slots: Slots, rows: Sequence[Row], proposal: Proposal) -> Tensor:
    """The target's logits [B, k + 1, V] after each row's last token and after each proposed token."""
    last = torch.tensor([[r.sequence[-1]] for r in rows], device=target.device)
    tokens = torch.cat([last, proposal.tokens], dim=1)
    place = slots.begin([r.target_length for r in rows], tokens.shape[1])
    logits: Tensor = target.model(
        input_ids=tokens, position_ids=place.positions, attention_mask=place.mask, cache=slots, use_cache=True
    ).logits
    return logits


def play(
    target: Target, slots: Slots, residents: Residents, rows: list[Row], lengths: list[int], top_k: int
) -> RoundResult:
    """Propose, verify, accept, once, and set every row's memory to what was accepted."""
    began = perf_counter()
    proposal, absorbed = propose(target, residents, rows, lengths)
    drafted = perf_counter()
    logits = verify(target, slots, rows, proposal)
    outcomes = accept(rows, lengths, proposal, logits, top_k)
    width = proposal.tokens.shape[1]
    for row, outcome in zip(rows, outcomes, strict=True):
        known = len(row.sequence)
        row.target_length = known + outcome.accepted
        if outcome.proposed:
            row.drafter_length = known + min(outcome.accepted, outcome.proposed - 1)
    return RoundResult(outcomes, width, (drafted - began) * 1e3, (perf_counter() - drafted) * 1e3, absorbed)
