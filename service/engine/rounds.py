"""One round over the live rows: propose, verify, accept. Nothing here knows of queues, text or clients."""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from adapter.acceptance import distribution, draw, matching_prefix, verify_chain
from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import DraftRow, Proposal
from adapter.target import Target
from adapter.teacher import top_rows
from service.engine.generation import Row, TeacherRow
from service.engine.slots import Slots


@dataclass(frozen=True)
class Live:
    """The drafter that proposes, with its own memory; without one, decoding is plain."""

    version: int
    drafter: CausalLM | None = None
    slots: Slots | None = None


@dataclass(frozen=True)
class Outcome:
    """What a round did for one row."""

    proposed: int
    accepted: int
    tokens: list[int]  # the accepted prefix and the next token
    rejected_token: int  # -1 where nothing was rejected
    rejected_q: float
    teacher: TeacherRow | None


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


def accept(rows: list[Row], lengths: list[int], proposal: Proposal, logits: Tensor, top_k: int) -> list[Outcome]:
    """Decide on every row. Proposals past a row's own draft length are padding, and are not looked at."""
    choices = logits.argmax(-1)
    matched = matching_prefix(proposal.tokens, choices[:, :-1]).tolist()
    proposed = [tokens[:k] for tokens, k in zip(proposal.tokens.tolist(), lengths, strict=True)]
    decided = []
    for i, row in enumerate(rows):
        if row.generation.policy.greedy:
            accepted = min(matched[i], lengths[i])
            decided.append((accepted, int(choices[i, accepted])))
        else:
            decided.append(_accept_sampled(row, proposed[i], proposal.q[i], logits[i]))
    teachers = _teacher_rows(rows, lengths, decided, logits, top_k)
    return [_outcome(proposed[i], proposal.q[i], *decided[i], teachers.get(i)) for i in range(len(rows))]


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


def _accept_sampled(row: Row, proposed: list[int], q: Tensor | None, logits: Tensor) -> tuple[int, int]:
    p = distribution(logits[: len(proposed) + 1], row.generation.policy).cpu()  # where the row's generator is
    if not proposed:
        return 0, draw(p[0], row.generator)
    assert q is not None, "a sampled row's proposal carries the q that it was drawn from"
    return verify_chain(p, q, proposed, row.generator)


def _outcome(proposed: list[int], q: Tensor | None, accepted: int, token: int, teacher: TeacherRow | None) -> Outcome:
    rejected = proposed[accepted] if accepted < len(proposed) else -1
    rejected_q = float(q[accepted, rejected]) if rejected >= 0 and q is not None else float(rejected >= 0)
    return Outcome(len(proposed), accepted, [*proposed[:accepted], token], rejected, rejected_q, teacher)


def _teacher_rows(
    rows: list[Row], lengths: list[int], decided: list[tuple[int, int]], logits: Tensor, top_k: int
) -> dict[int, TeacherRow]:
    """The target's top K at each row's rejection position, by row: one gather for the whole batch."""
    refused = [i for i, (a, _) in enumerate(decided) if a < lengths[i] and rows[i].generation.train]
    if not refused:
        return {}
    at = torch.tensor([decided[i][0] for i in refused], device=logits.device)
    ids, log_probs, tail = top_rows(logits[torch.tensor(refused, device=logits.device), at], top_k)
    return {
        i: TeacherRow(len(rows[i].generation.output_ids) + decided[i][0], ids[j], log_probs[j], float(tail[j]))
        for j, i in enumerate(refused)
    }
