"""Several drafters' proposals as one of the whole batch: each for rows of its own, or two of them in one tree."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adapter.acceptance import Drawn
from adapter.drafters.protocol import Proposal


@dataclass(frozen=True)
class Part:
    """One drafter's proposal for some rows."""

    places: list[int]  # of its rows in the batch
    counts: Sequence[int]  # real tokens a row
    made: Proposal

    @staticmethod
    def of(places: list[int], depths: Sequence[int], made: Proposal) -> "Part":
        """`depths`: how deep each row's was to go."""
        size = made.tokens.shape[1]
        return Part(places, [min(depth, size) for depth in depths] if made.lengths is None else made.lengths, made)

    @property
    def size(self) -> int:
        return self.made.tokens.shape[1]

    def parents(self) -> Tensor:
        """int64 [b, n]."""
        return _chain(self.made.tokens) if self.made.parents is None else self.made.parents

    def kept(self) -> Tensor:
        """int64 [b, n]: of a chain, all but the last token are in the drafter's memory, one after another."""
        if self.made.kept is not None:
            return self.made.kept
        places = _chain(self.made.tokens) + 1
        return torch.where(places + 1 < self.size, places, -1)


@dataclass
class Tree:
    """What is proposed for one row: tokens, each one's parent, and its place in a drafter's memory or -1."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def together(rows: int, parts: Sequence[Part]) -> Proposal:
    """The proposal of a batch; rows that nobody proposed for hold padding."""
    places = [place for part in parts for place in part.places]
    if len(set(places)) < len(places):
        return _joined(rows, parts)
    tokens = parts[0].made.tokens.new_zeros(rows, max(part.size for part in parts))
    counts = [0] * rows
    for part in parts:
        tokens[part.places, : part.size] = part.made.tokens
        for place, count in zip(part.places, part.counts, strict=True):
            counts[place] = count
    if all(part.made.parents is None for part in parts):
        return Proposal(tokens, _drawn(parts), lengths=counts)
    parents, kept = _chain(tokens).clone(), torch.full_like(tokens, -1)
    for part in parts:
        parents[part.places, : part.size] = part.parents()
        kept[part.places, : part.size] = part.kept()
    return Proposal(tokens, _drawn(parts), parents, counts, kept)


def first_of(parts: Sequence[Part]) -> dict[int, int]:
    """By place, of the rows that several have proposed for: how many tokens are the first one's."""
    asked = Counter(place for part in parts for place in part.places)
    first: dict[int, int] = {}
    for part in parts:
        for place, count in zip(part.places, part.counts, strict=True):
            if asked[place] > 1:
                first.setdefault(place, count)
    return first


def _drawn(parts: Iterable[Part]) -> tuple[Drawn, ...]:
    """What was drawn, by the rows' places in the batch."""
    return tuple(replace(d, rows=tuple(part.places[i] for i in d.rows)) for part in parts for d in part.made.drawn)


def _chain(tokens: Tensor) -> Tensor:
    """The parents [b, n] of tokens that follow one another."""
    return (torch.arange(tokens.shape[1], device=tokens.device) - 1).expand_as(tokens)


def _joined(rows: int, parts: Sequence[Part]) -> Proposal:
    """The same where two have proposed for a row. What was drawn stays where it was, for no such row has two."""
    found: list[list[Tree]] = [[] for _ in range(rows)]
    for part in parts:
        columns = (part.made.tokens.tolist(), part.parents().tolist(), part.kept().tolist())
        for place, count, *tree in zip(part.places, part.counts, *columns, strict=True):
            found[place].append(Tree(*(column[:count] for column in tree)))
    trees = [merged(each) if len(each) > 1 else each[0] if each else Tree() for each in found]
    counts, device = [len(tree.tokens) for tree in trees], parts[0].made.tokens.device
    columns = ([tree.tokens for tree in trees], [tree.parents for tree in trees], [tree.kept for tree in trees])
    tokens, parents, kept = (
        torch.tensor([one + [filler] * (max(counts) - len(one)) for one in column], device=device)
        for column, filler in zip(columns, (0, -1, -1), strict=True)
    )
    return Proposal(tokens, _drawn(parts), parents, counts, kept)


def merged(trees: Iterable[Tree]) -> Tree:
    """Trees of one row as one: what stands after the same tokens is one node. Those of earlier trees go first."""
    whole, nodes = Tree(), dict[tuple[int, int], int]()  # by parent and token
    for tree in trees:
        here = {-1: -1}  # where the tree's nodes stand in the whole
        for node, (token, parent, kept) in enumerate(zip(tree.tokens, tree.parents, tree.kept, strict=True)):
            key = (here[parent], token)
            at = here[node] = nodes.setdefault(key, len(whole.tokens))
            if at == len(whole.tokens):
                whole.tokens.append(token)
                whole.parents.append(key[0])
                whole.kept.append(kept)
            elif kept >= 0:
                whole.kept[at] = kept
    return whole
