"""What other threads ask of the engine: requests, cancellations, another drafter, and to stop.

The engine looks in between rounds, so nothing here ever changes under a round.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from service.engine.generation import Generation
from service.engine.residents import Resident

AUDITS = 8  # that wait at most; further ones are left out


class Busy(RuntimeError):
    """More requests wait than the engine takes; try again later."""


@dataclass(frozen=True)
class Swap:
    """A lane's drafter from the next round on, and the share of its requests that stay on the one before."""

    lane: str
    resident: Resident | None  # None: the one that is live
    holdback: float
    guarded: bool  # the floor looks at its first rounds
    done: "Future[int]"


class Inbox:
    """Thread-safe. Holds at most `capacity` waiting requests."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: deque[Generation] = deque()
        self._audits: deque[Generation] = deque()
        self._cancelled: set[str] = set()
        self._swaps: dict[str, Swap] = {}  # by lane
        self._stopping = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, generation: Generation) -> None:
        """Queue a request; raises `Busy`."""
        with self._changed:
            if len(self._requests) >= self._capacity or self._stopping:
                raise Busy(f"{len(self._requests)} requests are waiting")
            self._requests.append(generation)
            self._changed.notify()

    def submit_audit(self, generation: Generation) -> bool:
        """Queue a request that is decoded only where no other waits; False where too many do already."""
        with self._changed:
            if len(self._audits) >= AUDITS or self._stopping:
                return False
            self._audits.append(generation)
            self._changed.notify()
            return True

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify()

    def swap(self, lane: str, resident: Resident | None, holdback: float = 0.0, guarded: bool = False) -> "Future[int]":
        """Ask for another drafter. One that was asked for and not yet taken is overtaken, and its future cancelled."""
        done: Future[int] = Future()
        with self._changed:
            overtaken = self._swaps.get(lane)
            self._swaps[lane] = Swap(lane, resident, holdback, guarded, done)
            self._changed.notify()
        if overtaken is not None:
            overtaken.done.cancel()
        return done

    def lanes(self) -> set[str]:
        """The lanes of the requests that wait."""
        with self._changed:
            return {generation.lane for generation in self._requests}

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def wait(self, busy: bool) -> bool:
        """Wait until there is something to do, at once where the engine is `busy`; False when it is to stop."""
        with self._changed:
            while not (busy or self._requests or self._audits or self._cancelled or self._swaps or self._stopping):
                self._changed.wait()
            return not self._stopping

    def take_request(self) -> Generation | None:
        with self._changed:
            waiting = self._requests or self._audits
            return waiting.popleft() if waiting else None

    def take_all(self) -> list[Generation]:
        with self._changed:
            taken = [*self._requests, *self._audits]
            self._requests.clear()
            self._audits.clear()
            return taken

    def take_swaps(self) -> list[Swap]:
        with self._changed:
            taken, self._swaps = list(self._swaps.values()), {}
            return taken

    def take_cancelled(self) -> tuple[set[str], list[Generation]]:
        """The cancelled ids, and those requests among them that were still waiting."""
        with self._changed:
            ids, self._cancelled = self._cancelled, set()
            dropped = [g for g in self._requests if g.request_id in ids]
            for generation in dropped:
                self._requests.remove(generation)
            return ids, dropped
