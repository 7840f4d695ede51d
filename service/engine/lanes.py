"""What other threads ask of the drafters: another version in a lane, another share, other routes.

A drafter is made ready in the thread of who asks; the engine's own puts it in between two rounds.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import structlog
import torch

from adapter.drafters.protocol import Drafter, Shape
from adapter.packing import pack
from adapter.target import Target
from service.engine import attention
from service.engine.floor import Broken
from service.engine.inbox import Inbox, Swap
from service.engine.memory import KvMemory
from service.engine.residents import DEFAULT, Resident, Residents
from service.engine.slots import Slots
from service.engine.warming import warm_up

log = structlog.get_logger()


class Lanes:
    """Thread-safe but for `take_in`. A lane beside the default one is made by its first drafter."""

    def __init__(self, target: Target, residents: Residents, memory: KvMemory, inbox: Inbox, largest: Shape) -> None:
        """`largest` is the largest proposal that a drafter will be asked for."""
        self._target, self._residents, self._memory, self._inbox = target, residents, memory, inbox
        self._largest = largest

    def swap(self, version: int, drafter: Drafter | None, holdback: float, guarded: bool, lane: str) -> "Future[int]":
        """See `Engine.swap`."""
        if drafter is None:
            self._memory.take(f"lane {lane}", "no drafter", 0)
            return self._inbox.swap(lane, Resident(version, lane=lane), holdback, guarded)
        if drafter.decoder is not None:
            attention.install(drafter.decoder)
        drafter.join(self._target.model)
        if isinstance(drafter, torch.nn.Module):
            pack(drafter)
        each = warm_up(drafter, self._target, self._largest)
        found = self._residents.lane(lane)
        beside = found.live.position_bytes if found is not None and holdback > 0 else 0
        self._memory.take(f"lane {lane}", f"drafter version {version}", each + beside)
        slots = None
        if drafter.decoder is not None and not drafter.rides:
            slots = Slots(drafter.decoder, self._memory.count, self._memory.capacity)
        return self._inbox.swap(lane, Resident(version, drafter, slots, each, lane), holdback, guarded)

    def hold(self, share: float, lane: str = DEFAULT) -> "Future[int]":
        """From the next round on that share of a lane's requests stays on the drafter before.

        With 0 that one is let go; with 1 the lane goes back to it.
        """
        return self._inbox.swap(lane, None, share)

    def route(self, routes: Mapping[str, str]) -> None:
        """New requests of these workloads go to these lanes; to the default one where a lane has no drafter."""
        self._residents.routes = dict(routes)

    def routed(self) -> set[str]:
        """The lanes that routes lead to, or that waiting requests are on."""
        return {*self._residents.routes.values(), *self._inbox.lanes()}

    def version(self, lane: str = DEFAULT) -> int:
        """The version that proposes to most requests of a lane; 0 where there is none."""
        found = self._residents.lane(lane)
        return found.most.version if found is not None and found.most.drafter is not None else 0

    def broken(self, lane: str = DEFAULT) -> Broken | None:
        """The version that the engine went back from by itself since the lane's last swap."""
        found = self._residents.lane(lane)
        return found.floor.broken if found is not None else None

    @property
    def faults(self) -> int:
        """How often a drafter raised an error."""
        return self._residents.faults

    def take_in(self, swaps: Sequence[Swap]) -> bool:
        """Do what was asked for; whether any lane has another drafter now."""
        for swap in swaps:
            if swap.resident is None:
                swap.done.set_result(self._hold(swap.lane, swap.holdback))
                continue
            self._residents.swap(swap.resident, swap.holdback, swap.guarded)
            log.info("drafter.swapped", lane=swap.lane, version=swap.resident.version)
            swap.done.set_result(swap.resident.version)
        return any(swap.resident is not None for swap in swaps)

    def _hold(self, name: str, share: float) -> int:
        """The version that is live in the lane; 0 where the lane has gone."""
        lane = self._residents.lane(name)
        if lane is None:
            return 0
        lane.hold(share)
        self._memory.keep(f"lane {name}", sum(resident.position_bytes for resident in lane.all()))
        return lane.live.version
