"""The `ngram` drafter: no weights, only what was said before. The floor that every learned drafter must beat.

It looks for the last few tokens of a row in the row's own text (prompt lookup: Saxena 2023; LLMA, Yang et al., arXiv
2304.04487) and in recent outputs of its workload (`recent`, after SuffixDecoding, Oliaro et al., arXiv 2411.04975).
What followed there votes, longer matches with more weight, and the tokens with the most votes are proposed: so a tree
is deep where all agree, and broad where they do not. Tokens are chosen and not drawn, so sampled rows are verified
with q = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from adapter.drafters.protocol import DraftRow, EarlyExit, FollowRow, KeyValues, Passing, Proposal, Reading, Shape
from adapter.drafters.recent import LONGEST, Match, Recent
from adapter.sampling import Sampler

LEAST = 2  # tokens of a match in a row's own text
SEEN = 8  # latest places of the same tokens that are compared
FADE = 0.75  # what a token counts for against one that stands a step before it


class Ngram:
    """Proposes what followed the same tokens before. Shared by all rows; not thread-safe but for `recent`."""

    kind = "ngram"
    taps: tuple[int, ...] = ()
    depths = 1
    decoder = None
    rides = False
    early: EarlyExit | None = None

    def __init__(self, vocab_size: int, device: torch.device, recent: Recent | None = None) -> None:
        self.vocab_size = vocab_size
        self.draft_to_target = torch.arange(vocab_size, device=device)
        self.target_to_draft = self.draft_to_target
        self._recent = recent
        self._own: WeakKeyDictionary[Sampler, OwnText] = WeakKeyDictionary()

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """What the best matches say; a row without a match gets no proposal. `pending` is a row's whole text."""
        return self.proposal([self.found(row, shape.depth) for row in rows], rows, shape)

    def found(self, row: DraftRow, depth: int) -> list[Match]:
        """Continuations of up to `depth` tokens, those of longer matches first."""
        text = row.pending
        own = self._own.setdefault(row.sampler, OwnText())
        matches = own.matches(text, depth)
        if self._recent is not None:
            matches += self._recent.matches(row.workload, text, depth)
        return sorted((match for match in matches if match.tokens), key=lambda match: -match.matched)

    def proposal(self, found: Sequence[Sequence[Match]], rows: Sequence[DraftRow], shape: Shape) -> Proposal:
        """Chains or trees out of the rows' continuations."""
        trees = [_tree(each, min(shape.depth, row.draft_length), shape) for each, row in zip(found, rows, strict=True)]
        device, width = self.draft_to_target.device, max(len(tree.tokens) for tree in trees)
        tokens = [tree.tokens + [0] * (width - len(tree.tokens)) for tree in trees]
        lengths = [len(tree.tokens) for tree in trees]
        made = torch.tensor(tokens, dtype=torch.long, device=device).view(len(rows), width)
        if shape.is_chain:
            return Proposal(made, lengths=lengths)
        parents = [tree.parents + [-1] * (width - len(tree.parents)) for tree in trees]
        return Proposal(
            made, (), torch.tensor(parents, dtype=torch.long, device=device).view(len(rows), width), lengths
        )

    def join(self, model: Any) -> None:
        """It shares nothing with the target."""

    def reads(self, model: Any, passing: Passing, last: bool) -> Reading:
        """Never called, as the next one: it has no taps."""
        raise NotImplementedError("an ngram drafter reads nothing of the target's passes")

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        raise NotImplementedError("an ngram drafter reads nothing of the target's hidden states")

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        raise NotImplementedError("an ngram drafter has nothing to train")

    def logits(self, state: Tensor, depth: int = 0) -> Tensor:
        raise NotImplementedError("an ngram drafter has no logits")

    def own_tensors(self) -> dict[str, Tensor]:
        return {}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            raise ValueError("an ngram drafter has no weights")

    def trainable(self) -> list[nn.Parameter]:
        return []


class OwnText:
    """Where each pair of tokens of one row's text stands, kept up as the text grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}  # of the token after the pair, the latest last
        self._noted = LEAST

    def matches(self, text: Sequence[int], depth: int) -> list[Match]:
        """Continuations of the text's last tokens, by their latest places in it."""
        if self._noted > len(text):
            self._places.clear()  # another text
            self._noted = LEAST
        for end in range(self._noted, len(text)):
            places = self._places.setdefault(tuple(text[end - LEAST : end]), [])
            places.append(end)
            del places[:-SEEN]
        self._noted = max(len(text), LEAST)
        found = self._places.get(tuple(text[-LEAST:]), [])
        return [Match(_length(text, place), repeated(text, place, depth)) for place in reversed(found)]


def _length(text: Sequence[int], place: int) -> int:
    """How many tokens before `place` are the text's last ones."""
    length, most = LEAST, min(LONGEST, place)
    while length < most and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


def repeated(text: Sequence[int], place: int, depth: int) -> list[int]:
    """What stands from `place` on; past the text's end it goes on as a repetition would."""
    period = len(text) - place
    return [text[place + i % period] for i in range(depth)]


class _Tree(NamedTuple):
    tokens: list[int]
    parents: list[int]


@dataclass
class _Node:
    """A token after the text, and how many votes it has: those of all continuations that run through it."""

    votes: float = 0.0
    children: "dict[int, _Node]" = field(default_factory=dict)


def _tree(found: Sequence[Match], depth: int, shape: Shape) -> _Tree:
    """The tokens with the most votes, those that stand deeper for less; of a chain, the best one at each depth.

    A continuation has twice the votes for each token more that it matched.
    """
    tree, order, best = _Tree([], []), count(), list[tuple[float, int, int, int, _Node]]()
    branches = 1 if shape.is_chain else shape.branches

    def offer(node: _Node, at: int, worth: float) -> None:
        """The children of the node that stands at a place of the tree."""
        children = sorted(node.children.items(), key=lambda child: -child[1].votes)
        for token, child in children[:branches]:
            heappush(best, (-worth * child.votes / node.votes, next(order), token, at, child))

    offer(_laid_over(found, depth), -1, FADE)
    while best and len(tree.tokens) < shape.nodes:
        worth, _, token, parent, node = heappop(best)
        tree.tokens.append(token)
        tree.parents.append(parent)
        offer(node, len(tree.tokens) - 1, -worth * FADE)
    return tree


def _laid_over(found: Sequence[Match], depth: int) -> _Node:
    """All continuations from the text's end on."""
    root = _Node()
    for match in found:
        node, votes = root, 2.0**match.matched
        root.votes += votes
        for token in match.tokens[:depth]:
            node = node.children.setdefault(token, _Node())
            node.votes += votes
    return root
