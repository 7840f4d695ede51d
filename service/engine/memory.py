"""How much memory key-value slots take, and the bound that is kept by refusing, not by running out."""

from threading import Lock
from typing import Any

import torch

from service.engine.slots import Slots

GIB = 2**30


class MemoryBound(ValueError):
    """The slots that were asked for need more memory than REDRAFT_KV_MEMORY allows; the message says what fits."""


class KvMemory:
    """What the slots of the target and of every lane may take together, in bytes. Thread-safe."""

    def __init__(self, gib: float, count: int, capacity: int) -> None:
        self.limit, self.count, self.capacity = round(gib * GIB), count, capacity
        self._taken: dict[str, int] = {}  # bytes a position, by who has them
        self._lock = Lock()

    def needed(self, position_bytes: int) -> int:
        """Bytes of all slots, filled to their capacity."""
        return position_bytes * self.count * self.capacity

    def take(self, owner: str, what: str, position_bytes: int) -> None:
        """Set so much aside for the owner, in place of what it has; where it does not fit, raise `MemoryBound`."""
        with self._lock:
            others = sum(taken for name, taken in self._taken.items() if name != owner)
            self._check(what, self.needed(others + position_bytes))
            self._taken[owner] = position_bytes

    def keep(self, owner: str, position_bytes: int) -> None:
        """The owner needs no more than that of what it took."""
        with self._lock:
            self._taken[owner] = min(self._taken.get(owner, 0), position_bytes)

    def _check(self, what: str, total: int) -> None:
        """Raise `MemoryBound` where so many bytes are too many."""
        if total > self.limit:
            fits = max(self.count * self.limit // total, 0)
            raise MemoryBound(
                f"{what}: {self.count} slots of {self.capacity} positions need {total / GIB:.2f} GiB for keys and "
                f"values, REDRAFT_KV_MEMORY allows {self.limit / GIB:.2f}. Raise it, or lower REDRAFT_CONTEXT or "
                f"REDRAFT_SLOTS (about {fits} fit)"
            )


@torch.inference_mode()
def position_bytes(decoder: Any) -> int:
    """Bytes that one position of one slot takes: seen in a forward of one token, which also warms up."""
    slots = Slots(decoder, 1, 1)
    place = slots.begin([0], 1)
    decoder(
        input_ids=torch.zeros(1, 1, dtype=torch.long, device=slots.device),
        position_ids=place.positions,
        attention_mask=place.mask,
        cache=slots,
        use_cache=True,
    )
    return slots.position_bytes
