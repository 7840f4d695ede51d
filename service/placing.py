"""A drafter's versions in one server's engine: the live one, and beside it for a while another for a share of requests.

That other one is the version before, after a promotion, or a canary before one. Between the follower, which knows
where the pointer is (service/live), and the engine, which swaps between rounds. Runs in the follower's thread.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from service.engine.floor import Broken
from storage.registry import Pointer, Version

KEPT = 3  # loaded drafters kept for instant rollback

D = TypeVar("D")

log = structlog.get_logger()


@dataclass(frozen=True)
class Offer(Generic[D]):
    """A drafter that is to propose from now on."""

    generation: int
    version: Version
    drafter: D
    holdback: float = 0.0  # share of the requests that stays on the drafter offered before
    guarded: bool = False  # just promoted: its first rounds must not be below the floor
    canary: bool = False  # the one before is live and must not go: without room for both, the offer is refused


class Placing(Generic[D]):
    """`load`, `offer`, `hold` and `broken` are those of `LiveFollower`."""

    def __init__(
        self,
        load: Callable[[Version], D],
        offer: Callable[[Offer[D]], None],
        hold: Callable[[float], None],
        broken: Callable[[], Broken | None],
    ) -> None:
        self._load, self._offer, self._hold, self._broken = load, offer, hold, broken
        self.version: Version | None = None  # serves all requests, or all but the share of another one
        self.swaps = 0
        self._canary: Version | None = None  # serves a share, beside `version`
        self._holding = False  # the version before `version` serves a share
        self._kept: OrderedDict[int, D] = OrderedDict()  # by version id, the last used at the end

    @property
    def newest(self) -> Version | None:
        """The version that the floor is under."""
        return self._canary or self.version

    def broken(self) -> Broken | None:
        """What the engine went back from by itself, where that is the newest version."""
        found, newest = self._broken(), self.newest
        return found if found is not None and newest is not None and found.version == newest.number else None

    def apply(self, pointer: Pointer) -> None:
        """Bring the engine to where the pointer is; raises where a version cannot be loaded or swapped in."""
        self._settle(pointer)
        if pointer.canary is not None:
            self._try_out(pointer, pointer.canary)
        elif self.version is None or pointer.live.id != self.version.id:
            self._place(pointer)

    def let_go(self, pointer: Pointer) -> bool:
        """End a holdback that the pointer has none of any more; whether there was one."""
        if not self._holding or pointer.holdback > 0:
            return False
        self._hold(0.0)
        self._holding = False
        return True

    def _place(self, pointer: Pointer) -> None:
        """Swap to the live version, with the one before it standing by where a watch is open."""
        held = pointer.holdback > 0 and self._stand_by(pointer)
        fresh = pointer.kind == "promote" and self.version is not None
        self._swap(pointer.generation, pointer.live, pointer.holdback if held else 0.0, fresh or held)
        self.version, self._holding = pointer.live, held

    def _settle(self, pointer: Pointer) -> None:
        """The canary that was out is so no more: keep it where it was promoted, and else go back from it."""
        canary, found = self._canary, self._broken()
        if canary is None:
            return
        gone = found is not None and found.version == canary.number
        promoted = canary.id == pointer.live.id and not gone
        self._hold(pointer.holdback if promoted else 1.0)
        if promoted:
            self.version, self._holding = canary, pointer.holdback > 0
        self._canary = None

    def _try_out(self, pointer: Pointer, canary: Version) -> None:
        """Let a candidate propose for its share of the requests, and the live version for all others."""
        if self.version is None or self.version.id != pointer.live.id:
            self._swap(pointer.generation, pointer.live)
            self.version = pointer.live
        self._swap(pointer.generation, canary, 1.0 - pointer.canary_share, guarded=True, canary=True)
        self._canary, self._holding = canary, False

    def _stand_by(self, pointer: Pointer) -> bool:
        """See that the engine has the version before; without it the live one serves every request."""
        before = pointer.previous
        if before is None:
            return False
        if self.version is not None and self.version.id == before.id:
            return True
        try:
            self._swap(pointer.generation, before)
        except Exception as error:
            log.warning("live.no_holdback", version=before.number, error=type(error).__name__)
            return False
        self.version = before
        return True

    def _swap(
        self, generation: int, version: Version, holdback: float = 0.0, guarded: bool = False, canary: bool = False
    ) -> None:
        drafter = self._kept.get(version.id)
        if drafter is None:
            drafter = self._load(version)
        self._offer(Offer(generation, version, drafter, holdback, guarded, canary))
        self.swaps += 1
        self._kept[version.id] = drafter
        self._kept.move_to_end(version.id)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
