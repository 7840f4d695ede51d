"""How long a round takes, by batch size and draft length: the governor's view of the machine.

Each (batch, draft length) that was played has a robust mean of its own, and so have trees and lookups, which are
numbered after the draft lengths (`shapes`); a fit through all of them fills in those that were not. A common level
carries what moves all of them at once, such as other load or longer contexts, so that what was not played for a while
follows what is.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from types import MappingProxyType

from service.engine.fit import Fit, Point, Size, fitted
from service.engine.survival import RowClass

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # the greatest of each bucket
COLD = 2  # rounds before a mean is believed to be far from the fit: the very first one may be twice as long
FIRST = 5  # rounds whose lower quartile a mean starts from: whatever is done first is slow once or twice
CLIP = 1.25  # a round counts as no longer or shorter than by this factor: a neighbour can triple single ones
FORGET = 0.99  # what a round's weight loses with each further one
KEPT = 8.0  # a weight that is never forgotten
SURE = 128.0  # weight of a mean whose surprises are all the level's
LEVEL_RATE = 0.05
JUMP = 6  # rounds that were all longer, or all shorter, than by CLIP: then the load is another
STEADY = 4  # tokens a row that drafters catch up on in any round: what a rejection or a plain round leaves
CATCH_UP_RATE = 0.02
REFIT = 32  # rounds between two fits


@dataclass(frozen=True)
class Played:
    """What a round did and what it took."""

    batch: int
    width: int  # draft length of the padded round, the longest in it; or the number of what is no chain
    draft_ms: float
    verify_ms: float
    other_ms: float  # the rest of the round: committing, listeners
    absorbed: int  # tokens that drafters had to catch up on
    sampled: bool
    rows: tuple[tuple[RowClass, int, int], ...]  # class, proposed, accepted
    by_match: tuple[tuple[RowClass, int, int], ...] = ()  # of trees of both: what the match alone would have done

    @property
    def ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def committed(self) -> int:
        return self.batch + sum(accepted for _, _, accepted in self.rows)


def bucket(batch: int) -> int:
    """The greatest batch of the bucket that a batch falls into."""
    return BATCHES[min(bisect_left(BATCHES, batch), len(BATCHES) - 1)]


@dataclass
class Mean:
    """A mean that outliers hardly move, and that follows a drift."""

    value: float = 0.0
    weight: float = 0.0  # of what it knows, in rounds
    first: list[float] = field(default_factory=list)

    def add(self, value: float, gap: int) -> None:
        """Add a round, `gap` rounds after the last one: what is long ago counts less against it."""
        self.weight = max(self.weight * FORGET**gap, min(self.weight, KEPT)) + 1
        if len(self.first) < FIRST:
            self.first.append(value)
            self.value = sorted(self.first)[(len(self.first) - 1) // 4]
        else:
            clipped = min(max(value, self.value / CLIP), self.value * CLIP)
            self.value += (clipped - self.value) / self.weight


@dataclass
class Cell:
    """The rounds of one batch bucket and draft length, at the common level 1."""

    batch: float
    draft: Mean = field(default_factory=Mean)
    rest: Mean = field(default_factory=Mean)
    rounds: int = 0
    seen: int = 0  # number of the last round that was one

    @property
    def ms(self) -> float:
        return self.draft.value + self.rest.value


class Costs:
    """Predicts a round's duration. Kept across swaps: drafters of one server are of one shape."""

    def __init__(self, further: Mapping[int, Size] = MappingProxyType({})) -> None:
        """`further`: the sizes of what is no chain, by number."""
        self._further = further
        self._cells: dict[tuple[int, int, bool], Cell] = {}  # by bucket, draft length, sampled
        self._fit = Fit()
        self._level = 1.0
        self._surprises: deque[float] = deque(maxlen=JUMP)
        self._round = 0
        self._behind = STEADY + 1  # plain rounds since the drafter was last used: rows fall behind by as many tokens
        self._catch_up = 0.0  # ms a row and round, for prompts of requests that join
        self._entry = 0.0  # ms a row, for what a plain spell or a swap left

    def observe(self, played: Played) -> None:
        """Note a round."""
        self._round += 1
        extra, key = self._extra(played), (bucket(played.batch), played.width, played.sampled)
        cell = self._cells.setdefault(key, Cell(played.batch))
        if cell.rounds >= FIRST:
            self._move_level(played.ms - extra, cell)
        self._add(played, cell, extra)
        if played.width > 0:
            self._note_extra(extra / played.batch)
        self._behind = 0 if played.width > 0 else self._behind + 1
        if cell.rounds <= COLD or self._round % REFIT == 0:
            self._fit = fitted(self._points())

    def swapped(self) -> None:
        """The next drafter starts without memory of any row."""
        self._behind = STEADY + 1

    def predict(self, batch: int, draft_length: int, sampled: bool) -> float:
        """Milliseconds of a round."""
        fitted = self._fit.ms(batch, self._size(draft_length), sampled)
        cell = self._cells.get((bucket(batch), draft_length, sampled))
        if cell is not None:
            local = cell.ms * fitted / self._fit.ms(cell.batch, self._size(draft_length), sampled)
            local = local if cell.rounds >= COLD else min(local, fitted * CLIP)
            fitted = (fitted + cell.rounds * local) / (1 + cell.rounds)
        catch_up = self._catch_up * batch if draft_length > 0 else 0.0
        return fitted * self._level + catch_up

    def charge(self, played: Played) -> float:
        """What a round took, as far as it was its own doing: no neighbour's share, no joining request's prompt."""
        extra, usual = self._extra(played), self.predict(played.batch, played.width, played.sampled)
        return min(played.ms - extra, usual * CLIP) + (extra if self._behind > STEADY else 0.0)

    def entry_ms(self, batch: int) -> float:
        """What the next round takes longer if it speculates after a plain spell."""
        return self._entry * batch if self._behind > STEADY else 0.0

    def played(self, batch: int, draft_length: int, sampled: bool) -> int:
        """How often such a round was seen."""
        cell = self._cells.get((bucket(batch), draft_length, sampled))
        return cell.rounds if cell else 0

    def since(self, batch: int, draft_length: int, sampled: bool) -> int:
        """How many rounds ago such a round was seen; all there were, for never."""
        cell = self._cells.get((bucket(batch), draft_length, sampled))
        return self._round - (cell.seen if cell else 0)

    def _extra(self, played: Played) -> float:
        """Drafting time that catching up took."""
        if played.width == 0 or played.absorbed <= STEADY * played.batch:
            return 0.0
        cell = self._cells.get((bucket(played.batch), played.width, played.sampled))
        if cell is not None and cell.draft.weight > 0:
            usual = cell.draft.value * self._level
        else:  # at most what the fit gives to the whole proposal
            fit, batch, sampled = self._fit, played.batch, played.sampled
            proposing = fit.ms(batch, self._size(played.width), sampled)
            usual = (proposing - fit.ms(batch, self._size(0), sampled)) * self._level
        return max(played.draft_ms - usual, 0.0)

    def _move_level(self, ms: float, cell: Cell) -> None:
        """Follow what the mean did not expect: slowly, but at once where all of the last rounds agree."""
        ratio = ms / (cell.ms * self._level)
        self._surprises.append(ratio)
        if len(self._surprises) == JUMP and (min(self._surprises) > CLIP or max(self._surprises) < 1 / CLIP):
            self._level *= median_low(self._surprises)
            self._surprises.clear()
        else:
            rate = LEVEL_RATE * min(cell.rest.weight / SURE, 1.0)
            self._level *= 1 + rate * (min(max(ratio, 1 / CLIP), CLIP) - 1)

    def _add(self, played: Played, cell: Cell, extra: float) -> None:
        gap, cell.seen = self._round - cell.seen, self._round
        cell.rounds += 1
        cell.batch += (played.batch - cell.batch) / min(cell.rounds, 50)
        cell.rest.add((played.verify_ms + played.other_ms) / self._level, gap)
        if played.absorbed <= STEADY * played.batch or cell.draft.weight == 0:
            cell.draft.add((played.draft_ms - extra) / self._level, gap)

    def _note_extra(self, row_ms: float) -> None:
        if self._behind > STEADY:
            self._entry += 0.5 * (row_ms - self._entry)
        else:
            self._catch_up += CATCH_UP_RATE * (row_ms - self._catch_up)

    def _points(self) -> list[Point]:
        """Of what is not cold, if there is anything."""
        found = {key: cell for key, cell in self._cells.items() if cell.rounds >= COLD} or self._cells
        return [Point(c.batch, self._size(k), sampled, c.ms, c.rounds) for (_, k, sampled), c in found.items()]

    def _size(self, draft_length: int) -> Size:
        return self._further.get(draft_length) or Size(draft_length, draft_length)
