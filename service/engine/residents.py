"""The drafters in memory: the live one, and for a while its predecessor, on which a share of the requests stays.

Each has its own key-value slots, parallel to the target's. Versions that stand side by side have one draft
vocabulary, so that their proposals are verified together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from adapter.drafters.causal_lm import CausalLM
from service.engine.slots import Slots
from storage.shares import share_of as share_of


@dataclass(frozen=True)
class Resident:
    """A version with its own memory; without a drafter, decoding is plain."""

    version: int
    drafter: CausalLM | None = None
    slots: Slots | None = None


class Residents:
    """Which drafter proposes for which request."""

    def __init__(self) -> None:
        self.live = Resident(0)
        self._predecessor: Resident | None = None
        self._holdback = 0.0
        self.faults = 0

    def swap(self, live: Resident, holdback: float) -> None:
        """Make `live` propose; that share of requests stays on the predecessor, where its vocabulary is the same."""
        before = self.live
        self._predecessor = before if holdback > 0 and alike(before.drafter, live.drafter) else None
        self._holdback = holdback
        self.live = live

    def release(self) -> None:
        """The live version proposes for every request from now on."""
        self._predecessor = None

    def take_back(self) -> None:
        """Go back to the predecessor, where it still stands by; else decode plainly until another swap."""
        self.live, self._predecessor = self._predecessor or Resident(self.live.version), None

    def of(self, request_id: str) -> Resident:
        """The drafter of a request: always the same one between two swaps."""
        if self._predecessor is not None and share_of(request_id) < self._holdback:
            return self._predecessor
        return self.live

    def all(self) -> list[Resident]:
        return [r for r in (self.live, self._predecessor) if r is not None]

    @property
    def proposing(self) -> bool:
        """Whether there is any drafter."""
        return any(resident.drafter is not None for resident in self.all())

    def failed(self, versions: Iterable[int]) -> None:
        """Go on without the drafters of these versions."""
        self.faults += 1
        gone = set(versions)
        if self.live.version in gone:
            self.live = Resident(self.live.version)
        if self._predecessor is not None and self._predecessor.version in gone:
            self._predecessor = None

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another in every drafter's memory."""
        for resident in self.all():
            if resident.slots is not None:
                resident.slots.move(source, destination)


def alike(one: CausalLM | None, other: CausalLM | None) -> bool:
    """Whether both are there and propose from one draft vocabulary."""
    return one is not None and other is not None and torch.equal(one.draft_to_target, other.draft_to_target)
