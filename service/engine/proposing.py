"""The proposals of a round: each row's drafter asked for the rows that it serves, and all brought together."""

from collections.abc import Sequence

import torch

from adapter.acceptance import Drawn
from adapter.drafters.protocol import DraftRow, Proposal
from adapter.sampling import sampled_rows
from adapter.target import Target
from service.engine.generation import Row
from service.engine.residents import Resident, Residents

CAUGHT_UP = 2  # tokens that a drafter lacks after a round in which all was accepted


def propose(target: Target, residents: Residents, rows: Sequence[Row], lengths: Sequence[int]) -> tuple[Proposal, int]:
    """A proposal for the whole batch, and how many earlier tokens the drafters caught up on for it."""
    parts, absorbed = [], 0
    for resident, places in _by_drafter(residents, rows, lengths):
        served = [rows[i] for i in places]
        for row in served:
            _turn_to(row, resident)
        absorbed += sum(max(0, len(row.sequence) - row.drafter_length - CAUGHT_UP) for row in served)
        parts.append((places, _ask(resident, served, places, [lengths[i] for i in places])))
    if not parts:
        return nothing(target, len(rows)), 0
    return (parts[0][1] if len(parts[0][0]) == len(rows) else _together(rows, parts)), absorbed


def nothing(target: Target, rows: int) -> Proposal:
    """The proposal of plain decoding: no token for any row."""
    return Proposal(torch.empty(rows, 0, dtype=torch.long, device=target.device))


def _by_drafter(residents: Residents, rows: Sequence[Row], lengths: Sequence[int]) -> list[tuple[Resident, list[int]]]:
    """The drafters that are asked, each with the places of its rows in the batch."""
    chosen = [residents.of(row.generation.request_id) for row in rows]
    asked = [(r, [i for i, c in enumerate(chosen) if c is r and lengths[i] > 0]) for r in residents.all()]
    return [(resident, places) for resident, places in asked if places and resident.drafter is not None]


def _turn_to(row: Row, resident: Resident) -> None:
    """A row whose last proposal came from another drafter is new to this one."""
    if row.drafter_memory is not resident.slots:
        row.drafter_memory, row.drafter_length = resident.slots, 0


def _ask(resident: Resident, rows: Sequence[Row], places: list[int], lengths: Sequence[int]) -> Proposal:
    """One drafter's proposal; its memory then holds each row's sequence and all proposals but the last."""
    assert resident.drafter is not None, "only drafters are asked"
    assert resident.slots is not None, "a drafter has a memory"
    resident.slots.choose(places)
    draft_rows = [
        DraftRow(row.sequence[row.drafter_length :], row.drafter_length, k, row.sampler)
        for row, k in zip(rows, lengths, strict=True)
    ]
    return resident.drafter.propose(resident.slots, draft_rows)


def _together(rows: Sequence[Row], parts: Sequence[tuple[list[int], Proposal]]) -> Proposal:
    """Several drafters' proposals as one of the whole batch; rows that nobody proposed for hold padding."""
    width = max(part.tokens.shape[1] for _, part in parts)
    tokens = parts[0][1].tokens.new_zeros(len(rows), width)
    for places, part in parts:
        tokens[places, : part.tokens.shape[1]] = part.tokens
    return Proposal(tokens, _drawn_together(rows, parts, tokens))


def _drawn_together(
    rows: Sequence[Row], parts: Sequence[tuple[list[int], Proposal]], tokens: torch.Tensor
) -> Drawn | None:
    """What the sampled rows of the whole batch were drawn from; of rows that were not asked, nothing is looked at."""
    drawn = [(places, part.drawn) for places, part in parts if part.drawn is not None]
    if not drawn:
        return None
    sampled = sampled_rows([row.sampler for row in rows])
    first = drawn[0][1]
    q = first.q.new_zeros(len(sampled), tokens.shape[1], first.q.shape[-1])
    taken = first.taken.new_zeros(len(sampled), tokens.shape[1])
    for places, part in drawn:
        at = [sampled.index(i) for i in places if i in sampled]
        q[at, : part.q.shape[1]], taken[at, : part.taken.shape[1]] = part.q, part.taken
    return Drawn(tokens[sampled], q, taken, first.to_target)
