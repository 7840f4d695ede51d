"""What every drafter speaks: a `Proposal` out, and `KeyValues`, the memory of past tokens that it is lent.

The engine owns the key-value slots (service/engine/slots) and lends them to the drafter for a round.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adapter.policy import Policy


@dataclass(frozen=True)
class Placement:
    """Where the next forward's tokens stand: positions [B, n], and mask [B, 1, n, end], True where it may attend."""

    positions: Tensor
    mask: Tensor


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
    policy: Policy
    generator: torch.Generator | None


@dataclass(frozen=True)
class Proposal:
    """A chain a row: tokens [B, k] (target ids), and for sampled rows q [draft_length, V] that they were drawn from."""

    tokens: Tensor
    q: list[Tensor | None]
