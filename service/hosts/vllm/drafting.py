"""The proposals of one drafter version for vLLM's rows, with its memory of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapter.drafters.protocol import DraftRow, Shape
from adapter.drafters.reading import SHORT
from adapter.packing import pack
from adapter.sampling import Sampler
from service.engine import attention
from service.engine.residents import Resident
from service.engine.slots import Slots
from service.hosts.vllm.memory import GREEDY, Ints, Memory, Place

PROMPT = 8  # tokens of the proposal that a drafter makes before it serves anybody


@dataclass(frozen=True)
class Bounds:
    """What a drafter may take up inside the engine."""

    rows: int  # that vLLM decodes together at most
    context: int  # tokens of a row at most
    draft_length: int
    reading: int  # tokens that a drafter may catch up on in a step: as many as vLLM itself reads
    bytes: int  # of all keys and values of one version


@dataclass(frozen=True)
class Asked:
    """A row that is to be proposed for."""

    text: Ints  # all of its tokens; a view of vLLM's own, which changes after the step
    length: int  # tokens wanted; 0: none, but the row is there
    workload: str = "default"


class Drafting:
    """One version at work. Only the engine's thread uses it, once it is made."""

    def __init__(self, resident: Resident, bounds: Bounds, position_bytes: int = 0) -> None:
        assert resident.drafter is not None, "plain decoding needs no drafting"
        self._drafter, self._bounds = resident.drafter, bounds
        self._memory = Memory(resident.slots, bounds.rows, position_bytes, bounds.bytes)
        self.read = 0  # tokens of texts that the drafter was given to read; with n-grams none
        self.absorbed = 0  # those of rows that it was far behind with
        self.homeless = 0  # rows that there was no room for

    @torch.inference_mode()
    def propose(self, rows: Sequence[Asked]) -> list[list[int]]:
        """A chain for each row, no longer than asked for; none for a row that the drafter has yet to catch up on."""
        chains: list[list[int]] = [[] for _ in rows]
        places = self._memory.find([row.text for row in rows], self._bounds.draft_length)
        self.homeless += places.count(None)
        ready = self._ready(rows, places)
        if not ready:
            return chains
        chosen = [place for _, place in ready]
        depth = max(rows[at].length for at, _ in ready)
        drafted = [self._row(rows[at], place) for at, place in ready]
        if (slots := self._memory.slots) is not None:
            slots.choose([place.slot for place in chosen])
        proposal = self._drafter.propose(slots, drafted, Shape.chain(depth))
        tokens = proposal.tokens.tolist()
        for i, (at, place) in enumerate(ready):
            kept = rows[at].length if proposal.lengths is None else proposal.lengths[i]
            chains[at] = tokens[i][: min(kept, rows[at].length)]
            place.note(rows[at].text, tokens[i][: depth - 1] if slots is not None else [])
        return chains

    def _ready(self, rows: Sequence[Asked], places: Sequence[Place | None]) -> list[tuple[int, Place]]:
        """The rows whose places are up to date, in the order of their slots; others catch up on a part of theirs."""
        left, ready = self._bounds.reading, []
        found = [(at, place) for at, place in enumerate(places) if place is not None and rows[at].length]
        for at, place in sorted(found, key=lambda row: row[1].text - row[1].held):
            behind = len(rows[at].text) - 1 - place.held
            if self._memory.slots is None or behind < SHORT:
                ready.append((at, place))
            elif behind <= left:
                left -= behind
                self.absorbed += behind
                ready.append((at, place))
            elif left:
                self._catch_up(place, left)
                left = 0
        return sorted(ready, key=lambda row: row[1].slot)

    def _row(self, row: Asked, place: Place) -> DraftRow:
        start = place.held if self._memory.slots is not None else 0
        self.read += len(row.text) - start if self._memory.slots is not None else 0
        return DraftRow(row.text[start:].tolist(), start, row.length, place.sampler, None, row.workload)

    def _catch_up(self, place: Place, count: int) -> None:
        """Read so many tokens of the row's text, and propose nothing after them."""
        drafter: Any = self._drafter
        slots = self._memory.slots
        assert slots is not None, "n-grams are never behind"
        tokens = torch.tensor([place.tokens[place.held : place.held + count].tolist()], device=slots.device)
        slots.choose([place.slot])
        stands = slots.begin([place.held], count)
        drafter.hidden(tokens, stands.positions, stands.mask, slots)
        place.held += count
        self.read += count
        self.absorbed += count


def made_ready(version: int, drafter: Any, bounds: Bounds) -> tuple[Resident, Drafting]:
    """A loaded drafter as it will serve, after a first proposal that serves nobody. Raises where it cannot propose."""
    attention.install(drafter.decoder)
    pack(drafter)
    trial = Slots(drafter.decoder, 1, PROMPT + bounds.draft_length + 1)
    row = DraftRow([0] * PROMPT, 0, bounds.draft_length, Sampler(GREEDY, [], []))
    with torch.inference_mode():
        drafter.propose(trial, [row], Shape.chain(bounds.draft_length))
    slots = Slots(drafter.decoder, 1, bounds.context + bounds.draft_length)
    resident = Resident(version, drafter, slots, trial.position_bytes)
    return resident, Drafting(resident, bounds, trial.position_bytes)
