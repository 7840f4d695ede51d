"""What every drafter speaks: a `Proposal` out, and `KeyValues`, the memory of past tokens that it is lent.

A drafter is anything that has the members of `Drafter`; nothing is inherited. The engine owns the key-value slots
(service/engine/slots) and lends them to the drafter for a round; it keeps one vector a row for the drafters that
are conditioned on the target's hidden states, and hands it back with the row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from adapter.acceptance import Drawn
from adapter.sampling import Sampler


@dataclass(frozen=True)
class Placement:
    """Where the next forward's tokens stand, positions [B, n], and to which places before `end` they may attend.

    The mask [B, 1, n, end] is added to attention's scores: 0 where a token may attend. A decoder with several
    kinds of layers has one for each, by name.
    """

    positions: Tensor
    mask: Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Branches:
    """How a forward's n tokens hang together where they are no chain.

    The tree's f + n tokens stand in the row's memory from place `roots[i]` on, in the order in which they were
    given: f in earlier forwards, and n in this one. A token at depth d (0: the first one) has position roots[i] + d.
    """

    roots: list[int]
    depths: Tensor  # int64 [B, f + n]
    sees: Tensor  # bool [B, n, f + n]: the token's ancestors and itself, among the tree's tokens


class KeyValues(Protocol):
    """Key-value slots of consecutive rows; passed to a transformers decoder as its `cache`."""

    def begin(self, starts: list[int], width: int, first: int = 0, branches: Branches | None = None) -> Placement:
        """Make ready for a forward of `width` tokens a row, row i (slot first + i) from place starts[i] on.

        Without `branches` a token's place is its position, and it may attend to all that stands before it.
        """


class Passing(Protocol):
    """The target's own keys and values during one of its passes."""

    @property
    def placed(self) -> Placement:
        """Where the pass's tokens stand."""

    @property
    def narrowed(self) -> Tensor | None:
        """Where some of them were dropped on the way, the others [B, m]."""

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, end, dim] of a layer that has run."""


class Reading(Protocol):
    """What passes of the target leave for a drafter."""

    def reading(self) -> AbstractContextManager[None]:
        """Let the passes of this block leave it."""

    def hidden(self) -> Tensor:
        """Of the last pass, for each of its tokens: [B, n, F]."""


class EarlyExit(Protocol):
    """Says from a hidden state in the middle of the target's pass what follows, so that a tree can be pruned there."""

    @property
    def layer(self) -> int:
        """How many of the target's layers have run."""

    def log_probs(self, states: Tensor, tokens: Tensor) -> Tensor:
        """After each of the states [B, n, H]: log-probabilities [B, n, m] of target ids [B, m]; -inf: not known."""


@dataclass(frozen=True)
class Shape:
    """How large a proposal is and what form it has: a chain where `nodes` is `depth`, else a tree.

    A tree is of the fixed `form` where there is one (the index of each node's parent, -1: the last committed token;
    siblings by falling rank), else it is grown by the drafter's confidence.
    """

    depth: int  # tokens on the longest path
    nodes: int  # tokens a row at most
    branches: int = 1  # children of a node at most, and nodes that are continued at each depth
    form: tuple[int, ...] = ()
    kept: int = 0  # tokens of a tree that go through the whole of the target's pass, if its drafter can prune; 0: all

    @staticmethod
    def chain(length: int) -> "Shape":
        return Shape(length, length)

    @property
    def places(self) -> int:
        """How many places after a row's last token it may take up in a memory."""
        if self.is_chain or self.form:
            return self.nodes
        return max(self.nodes, (self.depth - 1) * self.branches)

    @property
    def is_chain(self) -> bool:
        return self.nodes == self.depth and not self.form


@dataclass(frozen=True)
class Level:
    """The nodes of a proposal that are continued at one depth, w a row, as `tree.grow` tells them to a drafter."""

    depth: int  # of the nodes; 1: children of the last committed token
    tokens: Tensor  # int64 [B, w], target ids
    above: Tensor  # int64 [B, w]: the place of each node's parent in the level before; 0 at depth 1
    starts: list[int]  # the place of each row's first node in the drafter's memory
    branches: Branches | None  # for `KeyValues.begin`; None for chains


Step = Callable[[Level], Tensor]  # the drafter's logits [B, w, V_d] after each node of a level


@dataclass(frozen=True)
class DraftRow:
    """One row of a batch, as a drafter sees it: tokens that its memory lacks, and how to choose."""

    pending: list[int]  # the sequence from `start` to its last token; never empty; all of it without a memory
    start: int  # how many tokens of the sequence the drafter's memory holds
    draft_length: int  # tokens wanted on the longest path; 0 for plain decoding
    sampler: Sampler
    state: Tensor | None = None  # [S], what `follow` gave for the row; only of drafters with taps
    workload: str = "default"


@dataclass(frozen=True)
class FollowRow:
    """One row of a target pass, as a drafter with taps sees it."""

    start: int  # position in the sequence of the row's first hidden state
    following: list[int]  # the token that comes after each of the row's tokens
    state: Tensor | None = None  # [S], as kept before


@dataclass(frozen=True)
class Proposal:
    """A chain or a tree a row: tokens [B, n] (target ids), and what those of sampled rows were drawn from.

    Sampled rows that are in none of `drawn` were not drawn but chosen: the ratio test takes their q as 1.
    """

    tokens: Tensor
    drawn: tuple[Drawn, ...] = ()
    parents: Tensor | None = None  # int64 [B, n], each before its children; -1: the last committed token; None: chains
    lengths: Sequence[int] | None = None  # real tokens a row; None: as many as each row's draft length
    kept: Tensor | None = None  # int64 [B, n]: place in the drafter's memory, after the row's last token, or -1


class Drafter(Protocol):
    """A drafter of any kind (structural)."""

    @property
    def kind(self) -> str:
        """`causal_lm`, `medusa`, `mtp`, `eagle`, `streaming` or `ngram`."""

    @property
    def taps(self) -> tuple[int, ...]:
        """What it is conditioned on: outputs of these decoder layers of the target, F = H * len(taps) together.

        Counted from 1; 0 is the embedding's output and -1 that of the final norm, which the target's head reads.
        """

    @property
    def decoder(self) -> nn.Module | None:
        """A transformers decoder whose keys and values live in the engine's slots; None: no memory."""

    @property
    def rides(self) -> bool:
        """Whether it runs in the target's pass and over the target's own memory: its decoder then needs none."""

    @property
    def early(self) -> EarlyExit | None:
        """By which its trees are pruned in the middle of the target's pass, where it has one."""

    @property
    def depths(self) -> int:
        """Distinct depths of `unrolled`; 1 for a drafter that is a language model of its own."""

    @property
    def draft_to_target(self) -> Tensor:
        """int64 [V_d]: its tokens in the target's vocabulary; part of a version."""

    @property
    def target_to_draft(self) -> Tensor:
        """int64 [V]: the inverse; -1 for the tokens that it never proposes."""

    @property
    def vocab_size(self) -> int:
        """V: the size of the target's vocabulary."""

    def join(self, model: Any) -> None:
        """It will be served beside this target: use the target's own layers instead of copies of them."""

    def reads(self, model: Any, passing: Passing, last: bool) -> Reading:
        """How it reads passes of this target, of which it needs but the last token if `last`. Only with taps."""

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """A proposal of `shape` for each row, no deeper than its draft length; row i owns slot i of `memory`."""

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """Take in what the target has verified; the states [B, S] that are kept for the rows. Only with taps.

        hidden [B, n, F] of the newly verified tokens, padded on the right: row i has len(rows[i].following). Called
        after each target pass, a piece of a prompt or a verification. Where a row's `start` is past the end of its
        memory, what stands between was never shown, and is not looked at.
        """

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """Teacher-forced states by depth j = 0 .. depth - 1, for training and replay.

        `logits(state, j)` at index i predicts token i + 1 + j, where the tokens i + 1 to i + j are those of `tokens`
        [B, n]. A language model of its own yields one: its depth j at i is depth 0 at i + j.
        """

    def logits(self, state: Tensor, depth: int = 0) -> Tensor:
        """States [..., H] to logits [..., V_d]."""

    def own_tensors(self) -> dict[str, Tensor]:
        """What a version consists of; no tensor that is shared with the target."""

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill in a version's tensors; names and shapes must be exactly those of `own_tensors`."""

    def trainable(self) -> list[nn.Parameter]:
        """The weights that learning changes."""
