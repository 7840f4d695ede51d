"""The proposals of a round: each row's drafter asked for the rows that it serves, and all brought together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adapter.drafters.protocol import DraftRow, Proposal, Shape
from adapter.target import Target
from service.engine.following import has_taps, turn_to
from service.engine.generation import Row
from service.engine.merging import Part, first_of, together
from service.engine.residents import Resident, blamed

CAUGHT_UP = 2  # tokens that a drafter lacks after a round in which all was accepted


@dataclass(frozen=True)
class Ask:
    """What is wanted of one drafter for one row. Two may be asked for a row whose tokens are chosen, not drawn."""

    place: int  # of the row in the batch
    of: Resident
    shape: Shape
    depth: int  # tokens wanted on the longest path, above 0


def propose(target: Target, asks: Sequence[Ask], rows: Sequence[Row]) -> tuple[Proposal, int, dict[int, int]]:
    """A proposal for the whole batch, and how many earlier tokens the drafters caught up on for it.

    And by place, of rows that two were asked for, how many tokens are those of the first, which stand first.
    """
    parts, absorbed = list[Part](), 0
    for (resident, shape), wanted in _by_drafter(asks).items():
        served = [rows[ask.place] for ask in wanted]
        if remembers(resident):
            for row in served:
                turn_to(row, resident)
        if resident.slots is not None:
            absorbed += sum(max(0, len(row.sequence) - row.drafter_length - CAUGHT_UP) for row in served)
        places, depths = [ask.place for ask in wanted], [ask.depth for ask in wanted]
        with blamed(resident):
            parts.append(Part.of(places, depths, _ask(resident, served, places, depths, shape)))
    if not parts:
        return nothing(target, len(rows)), 0, {}
    if len(parts) == 1 and len(parts[0].places) == len(rows):
        return parts[0].made, absorbed, {}
    return together(len(rows), parts), absorbed, first_of(parts)


def nothing(target: Target, rows: int) -> Proposal:
    """The proposal of plain decoding: no token for any row."""
    return Proposal(torch.empty(rows, 0, dtype=torch.long, device=target.device))


def _by_drafter(asks: Sequence[Ask]) -> Mapping[tuple[Resident, Shape], list[Ask]]:
    """The drafters that are asked, in which shape, and for what."""
    asked: dict[tuple[Resident, Shape], list[Ask]] = {}
    for ask in asks:
        asked.setdefault((ask.of, ask.shape), []).append(ask)
    return asked


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
