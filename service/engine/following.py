"""What drafters with taps are told of the target's passes: the hidden states of what was verified, in its order.

Between rounds a row keeps one vector (`Row.state`), and the drafter's memory of it. A pass that a drafter was not
shown, while its row was decoded plainly, is a gap in its memory, which nothing could fill without the hidden states
that were not kept: the row is first followed again, and is asked for proposals from the next round on. What the
drafter read before the gap, the prompt above all, it goes on seeing; after a second gap, what lies between them not.
That matters: an EAGLE drafter of SmolLM2 (2,865 positions) found 0.23 of the next tokens with all of the text, after
a gap 0.21 with the prompt and one token, and 0.10 with that token alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.drafters.protocol import FollowRow, Reading
from adapter.target import Target
from service.engine.generation import Row
from service.engine.residents import Resident, blamed
from service.engine.slots import Slots


@dataclass(frozen=True)
class Shown:
    """One row of a pass: its place in the batch, which of the pass's tokens were verified, and what followed each."""

    row: Row
    place: int  # its slot
    start: int  # position of the first verified token
    tokens: list[int]  # places in the pass; from its end, below 0
    following: list[int]
    index: int = 0  # its row of the pass


class Reads:
    """The hidden states that a pass leaves, for each of some drafters."""

    def __init__(self, taps: Mapping[Resident, Reading]) -> None:
        self._taps = taps

    def tell(self, resident: Resident, shown: Sequence[Shown]) -> None:
        """Let a drafter follow its rows; each gets its new state."""
        with blamed(resident):
            rows = [_begin(one, resident) for one in shown]
            if resident.slots is not None:
                resident.slots.choose([one.place for one in shown], [one.row.drafter_gap for one in shown])
            assert resident.drafter is not None, "only drafters follow"
            states = resident.drafter.follow(resident.slots, rows, self._hidden(resident, shown))
        for one, state in zip(shown, states, strict=True):
            one.row.state, one.row.drafter_length = state.clone(), one.start + len(one.following)

    def _hidden(self, resident: Resident, shown: Sequence[Shown]) -> Tensor:
        """[B, n, F] of the verified tokens, padded on the right."""
        read, width = self._taps[resident].hidden(), max(len(one.tokens) for one in shown)
        tokens = torch.tensor([one.tokens + [0] * (width - len(one.tokens)) for one in shown], device=read.device)
        return read[torch.tensor([one.index for one in shown], device=read.device)[:, None], tokens]


def has_taps(resident: Resident) -> bool:
    return resident.drafter is not None and bool(resident.drafter.taps)


def followers(served: Sequence[Resident], wanted: Sequence[int]) -> list[tuple[Resident, list[int]]]:
    """The drafters with taps that are wanted to propose, each with the places of its rows."""
    found: dict[Resident, list[int]] = {}
    for place, (resident, length) in enumerate(zip(served, wanted, strict=True)):
        if length > 0 and has_taps(resident):
            found.setdefault(resident, []).append(place)
    return list(found.items())


def ready(row: Row, resident: Resident) -> bool:
    """Whether a row's drafter may be asked: one with taps has followed it up to its last token."""
    if not has_taps(resident):
        return resident.drafter is not None
    return row.resident is resident and row.state is not None and row.drafter_length == row.target_length


@contextmanager
def reading(target: Target, slots: Slots, residents: Sequence[Resident], last: bool = False) -> Iterator[Reads]:
    """Read the hidden states of the pass in this block for these drafters.

    `last`: those of its last token, where a drafter has no memory that needs the others.
    """
    taps = {
        r: r.drafter.reads(target.model, slots, last and r.slots is None)
        for r in residents
        if r.drafter is not None and has_taps(r)
    }
    with ExitStack() as stack:
        for one in taps.values():
            stack.enter_context(one.reading())
        yield Reads(taps)


def turn_to(row: Row, resident: Resident) -> None:
    """A row whose last proposal came from another drafter is new to this one."""
    if row.resident is not resident:
        row.resident, row.drafter_memory = resident, resident.slots
        row.drafter_length, row.drafter_gap, row.state = 0, (0, 0), None


def _begin(shown: Shown, resident: Resident) -> FollowRow:
    row = shown.row
    turn_to(row, resident)
    if shown.start != row.drafter_length:
        first = row.drafter_gap[0] if row.drafter_gap[1] else row.drafter_length
        row.drafter_gap, row.state = (first, shown.start), None
    return FollowRow(shown.start, shown.following, row.state)
