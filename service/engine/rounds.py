"""One round over the live rows: propose, verify, accept. Nothing here knows of queues, text or clients."""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import DraftRow, Proposal
from adapter.target import Target
from service.engine.accept import Outcome, accept
from service.engine.generation import Row
from service.engine.slots import Slots


@dataclass(frozen=True)
class Live:
    """The drafter that proposes, with its own memory; without one, decoding is plain."""

    version: int
    drafter: CausalLM | None = None
    slots: Slots | None = None


@dataclass(frozen=True)
class RoundResult:
    outcomes: list[Outcome]
    draft_ms: float
    verify_ms: float


def prefill(target: Target, slots: Slots, slot: int, tokens: list[int], chunk: int) -> Tensor:
    """Fill one slot with a prompt, a chunk at a time; the logits [V] after its last token."""
    logits = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        place = slots.begin([start], len(part), first=slot)
        logits = target.model(
            input_ids=torch.tensor([part], device=target.device),
            position_ids=place.positions,
            attention_mask=place.mask,
            cache=slots,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    assert logits is not None, "a prompt has at least one token"
    last: Tensor = logits[0, -1]
    return last


def propose(drafter: CausalLM, slots: Slots, rows: list[Row], lengths: list[int]) -> Proposal:
    """The drafter's proposal for each row; its memory then holds the sequence and all proposals but the last."""
    draft_rows = [
        DraftRow(r.sequence[r.drafter_length :], r.drafter_length, k, r.generation.policy, r.generator)
        for r, k in zip(rows, lengths, strict=True)
    ]
    return drafter.propose(slots, draft_rows)


def nothing(target: Target, rows: list[Row]) -> Proposal:
    """The proposal of plain decoding: no token for any row."""
    return Proposal(torch.empty(len(rows), 0, dtype=torch.long, device=target.device), [None] * len(rows))


def verify(target: Target, slots: Slots, rows: list[Row], proposal: Proposal) -> Tensor:
    """The target's logits [B, k + 1, V] after each row's last token and after each proposed token."""
    last = torch.tensor([[r.sequence[-1]] for r in rows], device=target.device)
    tokens = torch.cat([last, proposal.tokens], dim=1)
    place = slots.begin([r.target_length for r in rows], tokens.shape[1])
    logits: Tensor = target.model(
        input_ids=tokens, position_ids=place.positions, attention_mask=place.mask, cache=slots, use_cache=True
    ).logits
    return logits


def play(target: Target, slots: Slots, live: Live, rows: list[Row], lengths: list[int], top_k: int) -> RoundResult:
    """Propose, verify, accept, once, and set every row's memory to what was accepted."""
    began = perf_counter()
    proposal = nothing(target, rows)
    if live.drafter is not None and live.slots is not None and max(lengths) > 0:
        proposal = propose(live.drafter, live.slots, rows, lengths)
    drafted = perf_counter()
    logits = verify(target, slots, rows, proposal)
    outcomes = accept(rows, lengths, proposal, logits, top_k)
    for row, outcome in zip(rows, outcomes, strict=True):
        known = len(row.sequence)
        row.target_length = known + outcome.accepted
        if proposal.tokens.shape[1]:
            row.drafter_length = known + min(outcome.accepted, proposal.tokens.shape[1] - 1)
    return RoundResult(outcomes, (drafted - began) * 1e3, (perf_counter() - drafted) * 1e3)
