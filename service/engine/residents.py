"""The drafters in memory. A lane is one drafter as it is served: its live version, and for a while the one before.

The default lane serves what no route names; a request stays on the lane that it was given when it came in. Each
version has its own key-value slots, parallel to the target's. What goes wrong in one lane leaves the others alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from adapter.drafters.protocol import Drafter
from service.engine.floor import Broken, Floor, FloorConfig, Proposed
from service.engine.generation import Generation
from service.engine.slots import Slots
from storage.shares import share_of as share_of

DEFAULT = ""  # the lane of what is not routed


@dataclass(frozen=True, eq=False)
class Resident:
    """A version with its own memory; without a drafter, decoding is plain."""

    version: int
    drafter: Drafter | None = None
    slots: Slots | None = None
    position_bytes: int = 0  # of its slots
    lane: str = DEFAULT


class DrafterFailed(RuntimeError):
    """A drafter raised an error, and it alone is to blame."""

    def __init__(self, resident: Resident) -> None:
        super().__init__(f"version {resident.version} of lane {resident.lane!r}")
        self.resident = resident


@contextmanager
def blamed(resident: Resident) -> Iterator[None]:
    """What is raised in here is the fault of this drafter."""
    try:
        yield
    except Exception as error:
        raise DrafterFailed(resident) from error


class Lane:
    """One drafter's versions in memory, and the floor under a new one. `floor.broken` may be read by any thread."""

    def __init__(self, name: str, floor: FloorConfig) -> None:
        self.name, self.floor = name, Floor(floor)
        self.live = Resident(0, lane=name)
        self._before: Resident | None = None
        self._share = 0.0  # of the requests, that the version before serves

    def swap(self, live: Resident, holdback: float, guarded: bool) -> None:
        """Make `live` propose; that share of the requests stays on the version before."""
        before = self.live
        self.floor.swapped(live.version, before.version, guarded)
        self._before = before if holdback > 0 and before.drafter is not None else None
        self._share = holdback
        self.live = live

    def hold(self, share: float) -> None:
        """That share of the requests stays on the version before from now on: with 0 it goes, with 1 the newer one."""
        self._share = share
        if share >= 1 and self._before is not None:
            self.live = self._before
        if share <= 0 or share >= 1:
            self._before = None

    def of(self, request_id: str) -> Resident:
        """The version that serves a request: always the same one between two changes."""
        if self._before is not None and share_of(request_id) < self._share:
            return self._before
        return self.live

    def all(self) -> list[Resident]:
        return [r for r in (self.live, self._before) if r is not None]

    @property
    def most(self) -> Resident:
        """The version that serves most requests."""
        return self._before if self._before is not None and self._share > 0.5 else self.live

    def note(self, rows: Sequence[Proposed]) -> Broken | None:
        """Count a round. Where it shows the new version to be below the floor, the lane goes back from it."""
        return self._go_back(self.floor.note(rows))

    def failed(self, resident: Resident) -> Broken | None:
        """Go on without this version; back to the one before where it was new."""
        broken = self.floor.failed([resident.version])
        if self.live is resident:
            self.live = Resident(resident.version, lane=self.name)
        if self._before is resident:
            self._before = None
        return self._go_back(broken)

    def _go_back(self, broken: Broken | None) -> Broken | None:
        """To the version before, where it still stands by; else decode plainly until another swap."""
        if broken is None or broken.version != self.live.version:
            return None
        self.live, self._before = self._before or Resident(broken.version, lane=self.name), None
        return broken


class Residents:
    """Which drafter proposes for which request. The engine's thread changes it; `admit` and `lane` any may call."""

    def __init__(self, floor: FloorConfig = FloorConfig()) -> None:
        self._floor = floor
        self._lanes = {DEFAULT: Lane(DEFAULT, floor)}
        self.routes: Mapping[str, str] = {}  # from workload to lane
        self.faults = 0

    def lane(self, name: str = DEFAULT) -> Lane | None:
        """The lane of this name, where there is one."""
        return self._lanes.get(name)

    def admit(self, workload: str) -> str:
        """The lane of a new request; the default one as long as the lane of its route has no drafter."""
        name = self.routes.get(workload, DEFAULT)
        lane = self._lanes.get(name)
        return DEFAULT if lane is None or lane.live.drafter is None else name

    def of(self, generation: Generation) -> Resident:
        """The version that serves a request; none where its lane has gone."""
        lane = self._lanes.get(generation.lane)
        return Resident(0, lane=generation.lane) if lane is None else lane.of(generation.request_id)

    def swap(self, live: Resident, holdback: float = 0.0, guarded: bool = False) -> None:
        """Make `live` propose in its lane, which is made where it is new, and goes with its drafter."""
        if live.drafter is None and live.lane != DEFAULT:
            self._lanes.pop(live.lane, None)
            return
        if live.lane not in self._lanes:
            self._lanes[live.lane] = Lane(live.lane, self._floor)
        self._lanes[live.lane].swap(live, holdback, guarded)

    def all(self) -> list[Resident]:
        return [resident for lane in self._lanes.values() for resident in lane.all()]

    @property
    def proposing(self) -> bool:
        """Whether there is any drafter."""
        return any(resident.drafter is not None for resident in self.all())

    def note(self, rows: Sequence[tuple[Resident, Proposed]]) -> list[tuple[str, Broken]]:
        """Count a round; the lanes that went back from a version because of it."""
        found = []
        for lane in self._lanes.values():
            played = [proposed for resident, proposed in rows if resident.lane == lane.name]
            if played and (broken := lane.note(played)) is not None:
                found.append((lane.name, broken))
        return found

    def failed(self, residents: Sequence[Resident]) -> list[tuple[str, Broken]]:
        """Go on without the drafters of these; the lanes that went back from a new version because of it."""
        self.faults += 1
        found = []
        for resident in residents:
            lane = self._lanes.get(resident.lane)
            if lane is not None and (broken := lane.failed(resident)) is not None:
                found.append((lane.name, broken))
        return found

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another in every drafter's memory."""
        for resident in self.all():
            if resident.slots is not None:
                resident.slots.move(source, destination)
