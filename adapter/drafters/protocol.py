"""What every drafter speaks: a `Proposal` out, and `KeyValues`, the memory of past tokens that it is lent.

The engine owns the key-value slots (service/engine/slots) and lends them to the drafter for a round.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adapter.acceptance import Drawn
from adapter.sampling import Sampler


@dataclass(frozen=True)
class Placement:
    """Where the next forward's tokens stand, positions [B, n], and to which positions before `end` they may attend.

    The mask [B, 1, n, end] is added to attention's scores: 0 where a token may attend. A decoder with several
    kinds of layers has one for each, by name.
    """

    positions: Tensor
    mask: Tensor | dict[str, Tensor]


class KeyValues(Protocol):
    """Key-value slots of consecutive rows; passed to a transformers decoder as its `cache`."""

    def begin(self, starts: list[int], width: int, first: int = 0) -> Placement:
        """Make ready for a forward of `width` tokens a row, row i (slot first + i) from position starts[i] on."""


@dataclass(frozen=True)
class DraftRow:
    """One row of a batch, as a drafter sees it: tokens that its memory lacks, and how to choose."""

    pending: list[int]  # the sequence from `start` to its last token; never empty
    start: int  # how many tokens of the sequence the drafter's memory holds
    draft_length: int  # proposals wanted; 0 for plain decoding
    sampler: Sampler


@dataclass(frozen=True)
class Proposal:
    """A chain a row: tokens [B, k] (target ids), and for the sampled rows among them what they were drawn from."""

    tokens: Tensor
    drawn: Drawn | None = None
