"""What a drafter remembers of vLLM's rows, found again by the text that it stands for.

vLLM gives a proposer the rows' tokens and nothing else, and rows move in the batch, leave it, come back after a
preemption, or begin as another one did. So a place is known by its tokens: the row's text, and the proposed tokens
after it. What a row has in common with its place is kept, a rejection being no different from any other departure;
a new row copies what another one holds of the same text. Places of rows that left stay until room is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from adapter.policy import Policy
from adapter.sampling import Sampler
from service.engine.slots import GROWTH, Slots

Ints = npt.NDArray[np.int32]

GREEDY = Policy(temperature=0.0)
FEW = 4  # rows that left and are remembered however few are here
COPIED = 16  # tokens in common with another row from which copying them is worth it
NOTHING: Ints = np.empty(0, dtype=np.int32)


@dataclass(eq=False)
class Place:
    """One row's."""

    slot: int
    tokens: Ints = field(default_factory=lambda: NOTHING)
    text: int = 0  # of `tokens`, those that were committed when the row was last seen
    held: int = 0  # of `tokens`, those that keys and values are held of
    seen: int = 0  # the step in which the row was last seen
    sampler: Sampler = field(default_factory=lambda: Sampler(GREEDY, [], []))  # what n-grams know a row by

    def goes_on_as(self, text: Ints) -> bool:
        """Whether `text` is this row's, some steps later."""
        return 0 < self.text <= len(text) and np.array_equal(self.tokens[: self.text], text[: self.text])

    def note(self, text: Ints, proposed: Sequence[int]) -> None:
        """Keys and values are held of all of the text, and of these proposed tokens after it."""
        self.tokens = np.concatenate([text, np.asarray(proposed, dtype=np.int32)])
        self.text, self.held = len(text), len(self.tokens)


class Memory:
    """Places for up to `most` rows, and the slots that hold their keys and values; no slots for n-grams."""

    def __init__(self, slots: Slots | None, most: int, position_bytes: int = 0, limit: int = 0) -> None:
        """Slots of `position_bytes` a position may take `limit` bytes together."""
        self.slots, self._most = slots, most
        self._position_bytes, self._limit = position_bytes, limit
        self._places: list[Place] = []  # by slot
        self._rows: list[Place | None] = []  # by their place in the batch, in the last step
        self._step = 0

    def find(self, texts: Sequence[Ints], room: int) -> list[Place | None]:
        """Each row's place, with what it holds of the row's text; None where there is no room for the row.

        `room` is how many tokens may be proposed after a text. Of the text's last token nothing is held: it is read
        again for the first proposed token. The places with rows come to stand side by side.
        """
        self._step += 1
        found = self._going_on(texts)
        for at, text in enumerate(texts):
            if not self._fits(len(self._places), len(text) + room):
                found[at] = None
            elif found[at] is None:
                found[at] = self._settle(text, len(text) + room)
        self._rows = found
        self._line_up([place for place in found if place is not None])
        return list(found)

    def _going_on(self, texts: Sequence[Ints]) -> list[Place | None]:
        """The places of the rows that were here before; most stand in the batch where they stood."""
        found: list[Place | None] = [None] * len(texts)
        for at, text in enumerate(texts):
            place = self._rows[at] if at < len(self._rows) else None
            if place is not None and place.seen < self._step and place.goes_on_as(text):
                found[at] = self._seen(place, text)
        for at, text in enumerate(texts):
            if found[at] is None:
                others = [p for p in self._places if p.seen < self._step and p.goes_on_as(text)]
                if others:
                    found[at] = self._seen(max(others, key=lambda place: place.text), text)
        return found

    def _seen(self, place: Place, text: Ints) -> Place:
        """The row's text is this now: keep what its place has in common with it."""
        place.held = min(common(place.tokens[: place.held], text), len(text) - 1)
        place.tokens, place.text, place.seen = text.copy(), len(text), self._step
        return place

    def _settle(self, text: Ints, length: int) -> Place | None:
        """A place for a new row, with what is held of its text elsewhere."""
        donor = max(self._places, key=lambda place: common(place.tokens[: place.held], text), default=None)
        place = self._vacant(donor, length)
        if place is None:
            return None
        if place is not donor:
            shared = 0 if donor is None else min(common(donor.tokens[: donor.held], text), len(text) - 1)
            place.held = 0
            if donor is not None and shared >= COPIED and self.slots is not None:
                self.slots.move(donor.slot, place.slot)
                place.tokens, place.held = donor.tokens, shared
        place.sampler = Sampler(GREEDY, [], [])
        return self._seen(place, text)

    def _vacant(self, donor: Place | None, length: int) -> Place | None:
        """A new place, or that of the row which was not seen for longest; the donor's only where it is the last one.

        As many rows that left are remembered as are here, and a few.
        """
        gone = [place for place in self._places if place.seen < self._step]
        enough = len(gone) > max(FEW, len(self._places) - len(gone))
        if not enough and len(self._places) < self._most and self._fits(len(self._places) + 1, length):
            place = Place(len(self._places))
            self._places.append(place)
            self._make_room()
            return place
        return min(gone, key=lambda place: (place is donor, place.seen), default=None)

    def _fits(self, places: int, length: int) -> bool:
        """Whether so many places of so many positions are allowed."""
        if self.slots is None:
            return True
        if length > self.slots.capacity:
            return False
        reserved = self.slots.reserved
        if length > reserved:
            reserved = min(self.slots.capacity, max(length, reserved + GROWTH))
        return max(self.slots.count, places + 1) * reserved * self._position_bytes <= self._limit

    def _make_room(self) -> None:
        """Twice as many slots where there are too few; one more than places, which `_swap` needs."""
        slots, places = self.slots, len(self._places)
        if slots is None or places < slots.count:
            return
        twice = min(2 * places, self._most)
        slots.count = (twice if self._fits(twice, slots.reserved) else places) + 1
        for layer in slots.layers:
            if layer.is_initialized:
                layer.keys, layer.values = _more(layer.keys, slots.count), _more(layer.values, slots.count)

    def _line_up(self, places: Sequence[Place]) -> None:
        """Move places to the first slots, so that they are read as a view and not copied in every forward."""
        wanted = set(places)
        idle = [place for place in self._places[: len(places)] if place not in wanted]
        for place in places:
            if place.slot >= len(places):
                self._swap(place, idle.pop())

    def _swap(self, place: Place, idle: Place) -> None:
        if self.slots is not None:
            spare = self.slots.count - 1
            if idle.held:
                self.slots.move(idle.slot, spare)
            if place.held:
                self.slots.move(place.slot, idle.slot)
            if idle.held:
                self.slots.move(spare, place.slot)
        place.slot, idle.slot = idle.slot, place.slot
        self._places[place.slot], self._places[idle.slot] = place, idle


def common(one: Ints, other: Ints) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def _more(held: Tensor, count: int) -> Tensor:
    room = held.new_zeros(count, *held.shape[1:])
    room[: len(held)] = held
    return room
