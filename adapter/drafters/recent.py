"""Recent outputs by workload, in a ring of fixed size, and where each few tokens of them stand.

Chains of places with the same hash, as LZ77 compressors keep them (RFC 1951, 4): inserting and finding take a few
steps a token, nothing is ever deleted, and what the ring has overwritten ends a chain. Three arrays hold everything;
their size is the bound, whatever is inserted.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

KEY = 3  # tokens of a match at least
LONGEST = 16  # beyond which a longer match says no more
STEPS = 24  # places of a chain that are looked at
BEST = 4  # matches that are given
GAP = -1  # between two outputs


class Match(NamedTuple):
    """A place where the text's last tokens stood before."""

    matched: int
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
        self._before = array("i", [0]) * self.capacity  # how far back the same hash stood; 0: nowhere that is kept
        self._heads = array("q", [-1]) * (self.capacity // 2)  # by hash, the last place
        self._end = 0  # tokens ever inserted; token i stands at i modulo the capacity

    @property
    def bytes(self) -> int:
        """What the arrays take."""
        parts = (self._tokens, self._owners, self._before, self._heads)
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
            window = (*window[-KEY + 1 :], token) if token != GAP else ()
            if len(window) == KEY:
                slot = self._slot(owner, window)
                last, self._heads[slot] = self._heads[slot], self._end
                back = self._end - last if last >= 0 else 0
                self._before[place] = back if back < self.capacity else 0
            else:
                self._before[place] = 0
            self._end += 1

    def matches(self, workload: str, text: Sequence[int], depth: int) -> list[Match]:
        """The best continuations of the text's last tokens in the workload's outputs, longest match first."""
        if len(text) < KEY:
            return []
        owner = owner_of(workload)
        found: list[Match] = []
        last = self._heads[self._slot(owner, tuple(text[-KEY:]))]
        for _ in range(STEPS):
            if last < 0 or last <= self._end - self.capacity:
                break
            length = self._length(owner, text, last)
            if length >= KEY and (tokens := self._after(last, depth)):
                found.append(Match(length, tokens))
            back = self._before[last & self._mask]
            if not back:
                break
            last -= back
        return sorted(found, key=lambda match: -match.matched)[:BEST]

    def _slot(self, owner: int, window: tuple[int, ...]) -> int:
        return hash((owner, *window)) & (len(self._heads) - 1)

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


def owner_of(workload: str) -> int:
    """A workload as a number of 31 bits."""
    return crc32(workload.encode()) >> 1
