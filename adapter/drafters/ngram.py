"""The `ngram` drafter: no weights, only what was said before. The floor that every learned drafter must beat.

It looks for the last few tokens of a row in the row's own text (prompt lookup: Saxena 2023; LLMA, Yang et al., arXiv
2304.04487) and in recent outputs of its workload (`recent`, after SuffixDecoding, Oliaro et al., arXiv 2411.04975),
and proposes what followed there: the longest match first, and in trees the continuations of others beside it. Tokens
are chosen and not drawn, so sampled rows are verified with q = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from adapter.drafters.protocol import DraftRow, EarlyExit, FollowRow, KeyValues, Passing, Proposal, Reading, Shape
from adapter.drafters.recent import Match, Recent
from adapter.sampling import Sampler

LEAST = 2  # tokens of a match in a row's own text
LONGEST = 16  # beyond which a longer match says no more
SEEN = 8  # latest places of the same tokens that are compared


class Found(NamedTuple):
    """What may follow a row's text."""

    matched: int  # tokens before it that are the same
    tokens: list[int]


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

    def found(self, row: DraftRow, depth: int) -> list[Found]:
        """Continuations of up to `depth` tokens, those of longer matches first."""
        text = row.pending
        own = self._own.setdefault(row.sampler, OwnText())
        matches = own.matches(text, depth)
        if self._recent is not None:
            matches += [Found(*match) for match in self._recent.matches(row.workload, text, depth)]
        return sorted((match for match in matches if match.tokens), key=lambda match: -match.matched)

    def proposal(self, found: Sequence[Sequence[Found]], rows: Sequence[DraftRow], shape: Shape) -> Proposal:
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

    def matches(self, text: Sequence[int], depth: int) -> list[Found]:
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
        return [Found(_length(text, place), repeated(text, place, depth)) for place in reversed(found)]


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


def _tree(found: Sequence[Match | Found], depth: int, shape: Shape) -> _Tree:
    """Continuations laid over one another, the first ones first, as long as there is room."""
    tree, children = _Tree([], []), dict[tuple[int, int], int]()
    for match in found[:1] if shape.is_chain else found:
        node = -1
        for token in match.tokens[:depth]:
            below = children.get((node, token))
            if below is None:
                if len(tree.tokens) >= shape.nodes:
                    break
                below = children[node, token] = len(tree.tokens)
                tree.tokens.append(token)
                tree.parents.append(node)
            node = below
    return tree
