"""What the governor goes by: the batch before it, and what it keeps of batches and rows like those."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from service.engine.lookups import Match
from service.engine.survival import RowClass


@dataclass(frozen=True)
class Batch:
    """What a choice depends on."""

    size: int
    sampled: bool
    classes: Mapping[RowClass, int]

    @staticmethod
    def of(rows: Sequence[RowClass], sampled: bool) -> "Batch":
        """A seeded row costs what a greedy one does and looks like a sampled one: what was played last decides."""
        return Batch(len(rows), sampled and any(row.policy != "greedy" for row in rows), Counter(rows))

    @cached_property
    def matches(self) -> frozenset[Match]:
        """Which n-gram matches its rows have."""
        return frozenset(row.match for row in self.classes)


@dataclass
class Standing:
    """What is chosen for batches of a size bucket and with rows of certain matches."""

    best: int = 0
    changed: int = 0  # the round in which it was chosen


@dataclass
class Seen:
    """Rows of one class in batches of one size bucket."""

    batch: int
    sampled: bool
    rounds: int
