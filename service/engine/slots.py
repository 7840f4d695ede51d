"""Key-value slots: preallocated memory of past tokens, one slot a row, with a length a row kept by the rows.

A transformers `Cache`, so any decoder with standard attention runs on it. A rejection lowers a row's length
and nothing is copied: stale entries lie at places that no mask admits until they are written again; of a tree the
accepted path alone is moved together. Rows that follow one another in the slots are read as a view; only a drafter
that serves some rows of a batch copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from adapter.drafters.protocol import Branches, Placement
from service.engine.reach import Reach

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
        """Write states [B, heads, n, dim] where `begin` said; those of all positions so far come back."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.slots.reserved:
            self.keys = self._grown(self.keys, key_states)
            self.values = self._grown(self.values, value_states)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        return self.keys[self.slots.rows, :, : self.slots.end], self.values[self.slots.rows, :, : self.slots.end]

    def _grown(self, old: Tensor, states: Tensor) -> Tensor:
        room = self._room(states)
        room[:, :, : old.shape[2]] = old
        return room

    def _write(self, room: Tensor, states: Tensor) -> None:
        start = self.slots.uniform
        if start is not None:
            room[self.slots.rows, :, start : start + states.shape[2]] = states
        else:
            room[self.slots.scattered, :, self.slots.columns] = states.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.end, 0

    def get_seq_length(self) -> int:
        return self.slots.end

    def get_max_length(self) -> int:
        return self.slots.capacity


class Slots(Cache):
    """`count` slots of up to `capacity` positions for a transformers decoder."""

    def __init__(self, decoder: Any, count: int, capacity: int) -> None:
        """Raises `NotServed` where a layer of the decoder keeps anything but keys and values."""
        embedding = decoder.get_input_embeddings().weight
        self.count, self.capacity, self.device = count, capacity, embedding.device
        self.reserved = 0
        self.end = 0
        self.rows: slice | Tensor = slice(0, 0)  # the slots of the next forward's rows
        self.uniform: int | None = None  # the start that all rows share; then a slice is written, not a scatter
        self.scattered = self.columns = torch.empty(0, dtype=torch.long)
        self.placed = Placement(self.scattered, self.scattered)  # the tokens of that forward
        self.narrowed: Tensor | None = None  # of its tokens, those that went on
        self._chosen: Sequence[int] = range(count)
        self._gaps: Sequence[tuple[int, int]] | None = None
        self._reach = Reach(decoder.config, embedding.device, embedding.dtype)
        super().__init__(layers=[SlotLayer(self) for _ in range(decoder.config.num_hidden_layers)])

    @property
    def position_bytes(self) -> int:
        """Memory of one position of one slot; known after the first forward."""
        used = [t for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values)]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in used)

    def choose(self, slots: Sequence[int], gaps: Sequence[tuple[int, int]] | None = None) -> None:
        """From now on row i of a forward owns slot slots[i], and looks at nothing from gaps[i][0] up to gaps[i][1]."""
        self._chosen = slots
        self._gaps = gaps if gaps is not None and any(end for _, end in gaps) else None

    def begin(self, starts: list[int], width: int, first: int = 0, branches: Branches | None = None) -> Placement:
        """Make ready for a forward of `width` tokens a row, row i from place starts[i] on.

        Row i owns the slot that `choose` gave to row first + i; by default slot first + i.
        """
        self.end, self.narrowed = max(starts) + width, None
        if self.end > self.capacity:
            raise ValueError(f"position {self.end} is past the slots' capacity of {self.capacity}")
        if self.end > self.reserved:
            self.reserved = min(self.capacity, max(self.end, self.reserved + GROWTH))
        self.uniform = starts[0] if min(starts) == max(starts) else None
        places = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        slots = self._chosen[first : first + len(starts)]
        self.rows, self.columns = self._indices(slots), places
        if self.uniform is None:
            self.scattered = torch.tensor(list(slots), device=self.device)[:, None].expand(len(starts), width)
        positions = places
        if branches is not None:
            positions = torch.tensor(branches.roots, device=self.device)[:, None] + branches.depths[:, -width:]
        gaps = None
        if self._gaps is not None:
            gaps = torch.tensor(list(self._gaps[first : first + len(starts)]), device=self.device)
        self.placed = Placement(positions, self._reach.masks(positions, self.end, gaps, branches))
        return self.placed

    def narrow(self, kept: Tensor) -> Placement:
        """Of the forward that is under way only these of its tokens [B, m] go on, each at its place."""
        slots = torch.arange(self.count, device=self.device)[self.rows] if isinstance(self.rows, slice) else self.rows
        self.uniform, self.scattered, self.narrowed = None, slots[:, None].expand_as(kept), kept
        self.columns = self.columns.gather(1, kept)
        positions, mask = self.placed.positions.gather(1, kept), self.placed.mask
        if isinstance(mask, dict):
            self.placed = Placement(positions, {kind: rows_of(one, kept) for kind, one in mask.items()})
        else:
            self.placed = Placement(positions, rows_of(mask, kept))
        return self.placed

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, end, dim] of a layer, as the forward that is under way reads them."""
        one = self.layers[layer]
        return one.keys[self.rows, :, : self.end], one.values[self.rows, :, : self.end]

    def keep(self, moved: Sequence[tuple[int, int, int]]) -> None:
        """Copy places within slots, all at once, (slot, from, to) each: a tree's accepted path is moved together."""
        if not moved:
            return
        slot, source, destination = torch.tensor(moved, device=self.device).T
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[slot, :, destination] = layer.keys[slot, :, source]
                layer.values[slot, :, destination] = layer.values[slot, :, source]

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another: how the last row fills the hole that a finished row leaves."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[destination] = layer.keys[source]
                layer.values[destination] = layer.values[source]

    def _indices(self, slots: Sequence[int]) -> slice | Tensor:
        """Slots as a slice where they follow one another, so that reading them is a view."""
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return torch.tensor(list(slots), device=self.device)


def rows_of(mask: Tensor, kept: Tensor) -> Tensor:
    """Of a mask [B, 1, n, end] the rows of some tokens [B, m]: [B, 1, m, end]."""
    each = mask.expand(len(kept), -1, -1, -1)
    return each.gather(2, kept[:, None, :, None].expand(-1, -1, -1, mask.shape[3]))
