"""How much memory key-value slots take, and the bound that is kept by refusing, not by running out."""

from typing import Any

import torch

from service.engine.slots import Slots

GIB = 2**30


class MemoryBound(ValueError):
    """The slots that were asked for need more memory than REDRAFT_KV_MEMORY allows; the message says what fits."""


class KvMemory:
    """What the target's and the drafters' slots may take together, in bytes."""

    def __init__(self, gib: float, count: int, capacity: int) -> None:
        self.limit, self.count, self.capacity = round(gib * GIB), count, capacity

    def needed(self, position_bytes: int) -> int:
        """Bytes of all slots, filled to their capacity."""
        return position_bytes * self.count * self.capacity

    def check(self, what: str, position_bytes: int, taken: int = 0) -> None:
        """Raise `MemoryBound` where `what` does not fit beside the `taken` bytes."""
        total = taken + self.needed(position_bytes)
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
