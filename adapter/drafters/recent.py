"""Recent outputs by workload, in a ring of fixed size, and where each few tokens of them stand.

Chains of places with the same hash, as LZ77 compressors keep them (RFC 1951, 4): inserting and finding take a few
steps a token, nothing is ever deleted, and what the ring has overwritten ends a chain. There are two sets of chains:
one of longer keys, so that a long match is found however often its last two tokens stand elsewhere, and one of pairs.
A few arrays hold everything; their size is the bound, whatever is inserted.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

KEYS = (4, 2)  # tokens of a key; the last: of a match at least
LONGEST = 16  # beyond which a longer match says no more
STEPS = 24  # places of a chain that are looked at
ENOUGH = 8  # matches of a longer key, with which those of a shorter one are not looked for
TOKEN_BYTES = 24  # that the arrays take for each token of the capacity
GAP = -1  # between two outputs


class Match(NamedTuple):
    """A place where a text's last tokens stood before."""

    matched: int  # how many of them
    tokens: list[int]  # what followed


class Recent:
    """The last `capacity` tokens of finished outputs.

    One thread inserts while another looks: a reader may meet tokens that are being overwritten, and then proposes
    something that the target refuses. Nothing else can come of it.
    """

    def __init__(self, capacity: int, vocab_size: int) -> None:
        """Tokens are below `vocab_size`; the capacity is rounded up to a power of two."""
        self.capacity = 1 << max(capacity - 1, 1).bit_length()
        self._vocab_size = vocab_size
        self._mask = self.capacity - 1
        self._tokens = array("i", [GAP]) * self.capacity
        self._owners = array("i", [0]) * self.capacity
        self._places = tuple(_Places(key, self.capacity) for key in KEYS)
        self._end = 0  # tokens ever inserted; token i stands at i modulo the capacity

    @property
    def bytes(self) -> int:
        """What the arrays take."""
        parts = (self._tokens, self._owners, *(part for places in self._places for part in places.parts))
        return sum(len(part) * part.itemsize for part in parts)

    def __len__(self) -> int:
        return min(self._end, self.capacity)

    def insert(self, workload: str, output: Sequence[int]) -> None:
        """Take in a finished output; of one longer than the ring, its end."""
        owner = owner_of(workload)
        window: tuple[int, ...] = ()
        for token in (GAP, *output[-(self.capacity - 1) :]):
            place = self._end & self._mask
            self._tokens[place], self._owners[place] = token, owner
            window = (*window[-max(KEYS) + 1 :], token) if token != GAP else ()
            for places in self._places:
                places.note(owner, window, self._end)
            self._end += 1

    def matches(self, workload: str, text: Sequence[int], depth: int) -> list[Match]:
        """Continuations of the text's last tokens in the workload's outputs, longest match first."""
        owner, found = owner_of(workload), dict[int, Match]()
        for places in self._places:
            if len(found) >= ENOUGH or len(text) < places.key:
                continue
            for last in places.of(owner, text, self._end):
                if last not in found and (match := self._match(owner, text, last, depth, places.key)):
                    found[last] = match
        return sorted(found.values(), key=lambda match: -match.matched)

    def _match(self, owner: int, text: Sequence[int], last: int, depth: int, least: int) -> Match | None:
        length = self._length(owner, text, last)
        tokens = self._after(last, depth) if length >= least else []
        return Match(length, tokens) if tokens else None

    def _length(self, owner: int, text: Sequence[int], last: int) -> int:
        """How many tokens up to place `last` are the text's last ones."""
        length, most = 0, min(LONGEST, len(text))
        while length < most and last - length >= 0:
            place = (last - length) & self._mask
            if self._owners[place] != owner or self._tokens[place] != text[-1 - length]:
                break
            length += 1
        return length

    def _after(self, last: int, depth: int) -> list[int]:
        tokens = []
        for at in range(last + 1, min(last + 1 + depth, self._end)):
            token = self._tokens[at & self._mask]
            if not 0 <= token < self._vocab_size:
                break
            tokens.append(token)
        return tokens


class _Places:
    """Where keys of one length end, the latest place first."""

    def __init__(self, key: int, capacity: int) -> None:
        self.key = key
        self._capacity = capacity
        self._before = array("i", [0]) * capacity  # how far back the same hash stood; 0: nowhere that is kept
        self._heads = array("q", [-1]) * (capacity // 2)  # by hash, the last place

    @property
    def parts(self) -> "tuple[array[int], ...]":
        return self._before, self._heads

    def note(self, owner: int, window: tuple[int, ...], end: int) -> None:
        """The last tokens up to place `end`."""
        back = 0
        if len(window) >= self.key:
            slot = self._slot(owner, window)
            last, self._heads[slot] = self._heads[slot], end
            back = end - last if last >= 0 and end - last < self._capacity else 0
        self._before[end & (self._capacity - 1)] = back

    def of(self, owner: int, text: Sequence[int], end: int) -> Iterator[int]:
        """Where the text's last tokens may end, in a ring whose tokens up to `end` were inserted."""
        last = self._heads[self._slot(owner, text)]
        for _ in range(STEPS):
            if last < 0 or last <= end - self._capacity:
                return
            yield last
            back = self._before[last & (self._capacity - 1)]
            if not back:
                return
            last -= back

    def _slot(self, owner: int, window: Sequence[int]) -> int:
        return hash((owner, *window[-self.key :])) & (len(self._heads) - 1)


def owner_of(workload: str) -> int:
    """A workload as a number of 31 bits."""
    return crc32(workload.encode()) >> 1
