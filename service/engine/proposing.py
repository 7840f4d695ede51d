"""The proposals of a round: each row's drafter asked for the rows that it serves, and all brought together."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adapter.drafters.protocol import DraftRow, Proposal, Shape
from adapter.target import Target
from service.engine.following import has_taps, turn_to
from service.engine.generation import Row
from service.engine.residents import Resident, blamed

CAUGHT_UP = 2  # tokens that a drafter lacks after a round in which all was accepted


def propose(
    target: Target, residents: Sequence[Resident], rows: Sequence[Row], lengths: Sequence[int], shapes: Sequence[Shape]
) -> tuple[Proposal, int]:
    """A proposal for the whole batch, and how many earlier tokens the drafters caught up on for it.

    residents, lengths, shapes: each row's, in their order.
    """
    parts, absorbed = [], 0
    for resident, shape, places in _by_drafter(residents, lengths, shapes):
        served = [rows[i] for i in places]
        if remembers(resident):
            for row in served:
                turn_to(row, resident)
        if resident.slots is not None:
            absorbed += sum(max(0, len(row.sequence) - row.drafter_length - CAUGHT_UP) for row in served)
        with blamed(resident):
            parts.append((places, _ask(resident, served, places, [lengths[i] for i in places], shape)))
    if not parts:
        return nothing(target, len(rows)), 0
    return (parts[0][1] if len(parts[0][0]) == len(rows) else _together(lengths, parts)), absorbed


def nothing(target: Target, rows: int) -> Proposal:
    """The proposal of plain decoding: no token for any row."""
    return Proposal(torch.empty(rows, 0, dtype=torch.long, device=target.device))


def _by_drafter(
    residents: Sequence[Resident], lengths: Sequence[int], shapes: Sequence[Shape]
) -> list[tuple[Resident, Shape, list[int]]]:
    """The drafters that are asked, in which shape, and the places of the rows in the batch."""
    asked: dict[tuple[Resident, Shape], list[int]] = {}
    for place, (resident, length, shape) in enumerate(zip(residents, lengths, shapes, strict=True)):
        if length > 0 and resident.drafter is not None:
            asked.setdefault((resident, shape), []).append(place)
    return [(*key, places) for key, places in asked.items()]


def _ask(resident: Resident, rows: Sequence[Row], places: list[int], lengths: Sequence[int], shape: Shape) -> Proposal:
    """One drafter's proposal; its memory then holds each row's sequence and all proposals that it went on from."""
    assert resident.drafter is not None, "only drafters are asked"
    if resident.slots is not None:
        resident.slots.choose(places, [row.drafter_gap for row in rows])
    draft_rows = [_draft_row(row, k, remembers(resident)) for row, k in zip(rows, lengths, strict=True)]
    return resident.drafter.propose(resident.slots, draft_rows, within(shape, max(lengths)))


def _draft_row(row: Row, length: int, remembered: bool) -> DraftRow:
    """A row as its drafter sees it: one that keeps nothing of it is given the whole text."""
    workload = row.generation.workload
    if not remembered:
        return DraftRow(row.sequence, 0, length, row.sampler, None, workload)
    return DraftRow(row.sequence[row.drafter_length :], row.drafter_length, length, row.sampler, row.state, workload)


def remembers(resident: Resident) -> bool:
    """Whether a drafter keeps anything of a row from round to round."""
    return resident.slots is not None or has_taps(resident)


def within(shape: Shape, depth: int) -> Shape:
    """The shape where no row wants to go deeper than `depth`."""
    if shape.is_chain:
        return Shape.chain(depth)
    return shape if shape.form else replace(shape, depth=min(shape.depth, depth))


def _together(lengths: Sequence[int], parts: Sequence[tuple[list[int], Proposal]]) -> Proposal:
    """Several drafters' proposals as one of the whole batch; rows that nobody proposed for hold padding."""
    width = max(part.tokens.shape[1] for _, part in parts)
    tokens = parts[0][1].tokens.new_zeros(len(lengths), width)
    counts = [0] * len(lengths)
    for places, part in parts:
        size = part.tokens.shape[1]
        tokens[places, :size] = part.tokens
        for i, place in enumerate(places):
            counts[place] = min(lengths[place], size) if part.lengths is None else part.lengths[i]
    drawn = tuple(replace(d, rows=tuple(places[i] for i in d.rows)) for places, part in parts for d in part.drawn)
    if all(part.parents is None for _, part in parts):
        return Proposal(tokens, drawn, lengths=counts)
    parents, kept = _trees_together(parts, tokens)
    return Proposal(tokens, drawn, parents, counts, kept)


def _trees_together(parts: Sequence[tuple[list[int], Proposal]], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Parents, and places in the drafters' memories, of trees and chains together."""
    chain = torch.arange(tokens.shape[1], device=tokens.device) - 1
    parents, kept = chain.expand_as(tokens).clone(), torch.full_like(tokens, -1)
    for places, part in parts:
        size = part.tokens.shape[1]
        if part.parents is not None:
            parents[places, :size] = part.parents
        kept[places, :size] = _fed(size, chain) if part.kept is None else part.kept
    return parents, kept


def _fed(size: int, chain: Tensor) -> Tensor:
    """Of a chain, all but the last token are in the drafter's memory, one after another."""
    return torch.where(chain[:size] + 2 < size, chain[:size] + 1, -1)
