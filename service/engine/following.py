"""What drafters with taps are told of the target's passes: the hidden states of what was verified, in its order.

Between rounds a row keeps one vector (`Row.state`), and the drafter's memory of it. A pass that a drafter was not
shown, while its row was decoded plainly or by another drafter, is a gap: the row is first followed again, its memory
beginning anew there, and is asked for proposals from the next round on.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.drafters.protocol import FollowRow
from adapter.taps import Taps
from adapter.target import Target
from service.engine.generation import Row
from service.engine.residents import Resident, blamed


@dataclass(frozen=True)
class Shown:
    """One row of a pass: its place in the batch, which of the pass's tokens were verified, and what followed each."""

    row: Row
    place: int  # its slot
    start: int  # position of the first verified token
    tokens: list[int]  # places in the pass
    following: list[int]
    index: int = 0  # its row of the pass


class Reads:
    """The hidden states that a pass leaves, for each of some drafters."""

    def __init__(self, taps: Mapping[Resident, Taps]) -> None:
        self._taps = taps

    def tell(self, resident: Resident, shown: Sequence[Shown]) -> None:
        """Let a drafter follow its rows; each gets its new state."""
        with blamed(resident):
            rows = [_begin(one, resident) for one in shown]
            if resident.slots is not None:
                resident.slots.choose([one.place for one in shown], [one.row.drafter_base for one in shown])
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
def reading(target: Target, residents: Sequence[Resident]) -> Iterator[Reads]:
    """Read the hidden states of the pass in this block for these drafters."""
    taps = {r: Taps(target.model, r.drafter.taps) for r in residents if r.drafter is not None and has_taps(r)}
    with ExitStack() as stack:
        for one in taps.values():
            stack.enter_context(one.reading())
        yield Reads(taps)


def turn_to(row: Row, resident: Resident) -> None:
    """A row whose last proposal came from another drafter is new to this one."""
    if row.resident is not resident:
        row.resident, row.drafter_memory = resident, resident.slots
        row.drafter_length, row.drafter_base, row.state = 0, 0, None


def _begin(shown: Shown, resident: Resident) -> FollowRow:
    turn_to(shown.row, resident)
    if shown.start != shown.row.drafter_length:
        shown.row.drafter_base, shown.row.state = shown.start, None
    return FollowRow(shown.start, shown.following, shown.row.state)
