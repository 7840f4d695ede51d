"""Key-value slots: preallocated memory of past tokens, one slot a row, with a length a row kept by the rows.

A transformers `Cache`, so any decoder with standard attention runs on it. A rejection lowers a row's length
and nothing is copied: stale entries lie at positions that no mask admits until they are written again. Live
rows always fill the first slots, so that a forward works on views.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from adapter.drafters.protocol import Placement

GROWTH = 256  # positions that a slot grows by at least; memory follows the longest live request


class SlotLayer(CacheLayerMixin):
    """Keys and values [slots, heads, positions, head dim] of one attention layer."""

    is_sliding = False

    def __init__(self, slots: "Slots") -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._room(key_states)
        self.values = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor) -> Tensor:
        # Zeroed, not empty: a masked position's weight is 0, and 0 * NaN would still be NaN.
        return states.new_zeros(self.slots.count, states.shape[1], self.slots.reserved, states.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write states [B, heads, n, dim] where `begin` said; views of all positions so far come back."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.slots.reserved:
            self.keys = self._grown(self.keys, key_states)
            self.values = self._grown(self.values, value_states)
        rows = slice(self.slots.first, self.slots.first + key_states.shape[0])
        self._write(self.keys[rows], key_states)
        self._write(self.values[rows], value_states)
        return self.keys[rows, :, : self.slots.end], self.values[rows, :, : self.slots.end]

    def _grown(self, old: Tensor, states: Tensor) -> Tensor:
        room = self._room(states)
        room[:, :, : old.shape[2]] = old
        return room

    def _write(self, room: Tensor, states: Tensor) -> None:
        if self.slots.uniform is not None:
            room[:, :, self.slots.uniform : self.slots.uniform + states.shape[2]] = states
        else:
            room[self.slots.rows, :, self.slots.columns] = states.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.end, 0

    def get_seq_length(self) -> int:
        return self.slots.end

    def get_max_length(self) -> int:
        return self.slots.capacity


class Slots(Cache):
    """`count` slots of up to `capacity` positions for a decoder of `layers` layers."""

    def __init__(self, layers: int, count: int, capacity: int, device: torch.device) -> None:
        self.count, self.capacity, self.device = count, capacity, device
        self.reserved = 0
        self.first, self.end = 0, 0
        self.uniform: int | None = None  # the start that all rows share; then a slice is written, not a scatter
        self.rows = self.columns = torch.empty(0, dtype=torch.long)
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def begin(self, starts: list[int], width: int, first: int = 0) -> Placement:
        """Make ready for a forward of `width` tokens a row, row i (slot first + i) from position starts[i] on."""
        self.first, self.end = first, max(starts) + width
        if self.end > self.capacity:
            raise ValueError(f"position {self.end} is past the slots' capacity of {self.capacity}")
        if self.end > self.reserved:
            self.reserved = min(self.capacity, max(self.end, self.reserved + GROWTH))
        self.uniform = starts[0] if min(starts) == max(starts) else None
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        if self.uniform is None:
            self.rows = torch.arange(len(starts), device=self.device)[:, None].expand(len(starts), width)
            self.columns = positions
        reachable = torch.arange(self.end, device=self.device)
        return Placement(positions, (reachable <= positions[:, :, None])[:, None])

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another: how the last row fills the hole that a finished row leaves."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[destination] = layer.keys[source]
                layer.values[destination] = layer.values[source]
