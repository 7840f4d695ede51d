"""Proposals as trees, for drafters of any kind: a fixed form, or one grown by the drafter's confidence.

`grow` asks the drafter once a depth for the logits of the nodes that are continued, all rows together. The form is
grown as in EAGLE-2 (Li et al., arXiv 2406.16858, 3.2): at each depth the nodes of highest cumulative probability are
continued, and of all nodes that came of it the best are proposed. Children of greedy and seeded rows are the
drafter's best choices (under the common noise).

Children of sampled rows are drawn without replacement, since the ratio test then accepts more than it would of the
likeliest tokens: at one child sum(min(p, q)) against p(argmax q), and all of p as soon as they cover it. Which node
gets how many is settled before they are drawn, and each drawn one is proposed: to drop one because it looks bad would
bias the output (osd.md 5.3, 6).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adapter.drafters.branching import Children, Choosing
from adapter.drafters.chain import grow_chain
from adapter.drafters.protocol import Branches, DraftRow, Level, Proposal, Shape, Step
from adapter.processing import DraftVocabulary

NEVER = float("-inf")
TIE = 1e-9  # by which a node stands behind one that was found before: never before its own parent


def grow(
    rows: list[DraftRow], shape: Shape, vocabulary: DraftVocabulary, places: list[int], first: Tensor, step: Step
) -> Proposal:
    """A proposal from the logits `first` [B, V_d] after each row's last token, and from those that `step` gives.

    places: where the drafter's memory has room for each row's proposed tokens.
    """
    if shape.is_chain:
        return grow_chain(rows, shape.depth, vocabulary, places, first, step)
    tree = _Tree(rows, shape, vocabulary, places)
    logits = first[:, None]
    for depth in range(1, shape.depth + 1):
        tree.extend(logits, depth)
        if depth == shape.depth or not tree.width:
            break
        logits = step(tree.level(depth))
    return tree.proposal()


class _Tree:
    """All nodes found so far, a level after the other, and those of the last level that are continued."""

    def __init__(self, rows: list[DraftRow], shape: Shape, vocabulary: DraftVocabulary, places: list[int]) -> None:
        self._rows, self._shape, self._places = rows, shape, places
        self._choosing = Choosing([row.sampler for row in rows], vocabulary)
        device, count = vocabulary.to_target.device, len(rows)
        self._form = _Form(shape.form) if shape.form else None
        self._limits = torch.tensor([row.draft_length for row in rows], device=device)
        self._tokens = torch.empty(count, 0, dtype=torch.long, device=device)
        self._parents = torch.empty(count, 0, dtype=torch.long, device=device)
        self._values = torch.empty(count, 0, device=device)
        self._kept = torch.empty(count, 0, dtype=torch.long, device=device)
        self._frontier = torch.full((count, 1), -1, device=device)  # nodes that are continued; -1: the last token
        self._value = torch.zeros(count, 1, device=device)  # their cumulative log-probability
        self._above = torch.zeros(count, 1, dtype=torch.long, device=device)
        self._sees = torch.empty(count, 1, 0, dtype=torch.bool, device=device)
        self._depths = torch.empty(count, 0, dtype=torch.long, device=device)

    @property
    def width(self) -> int:
        """Nodes a row that are continued next."""
        return self._frontier.shape[1]

    def extend(self, logits: Tensor, depth: int) -> None:
        """Give the continued nodes children, by the drafter's logits [B, w, V_d] after them."""
        most = min(self._shape.branches, logits.shape[-1]) if self._form is None else self._form.branches[depth - 1]
        paths = self._paths(depth - 1) if self._choosing.adjusts else []
        left, to_come = self._shape.nodes - self._choosing.drawn_nodes, self._shape.depth - depth + 1
        slots = min(-(-left // to_come), most * self.width)
        plan = None if self._form is None else self._form.slots(depth - 1).to(logits.device)
        children = self._choosing.children(logits, self._value, most, paths, depth - 1, slots, plan)
        self._add(children, depth)

    def level(self, depth: int) -> Level:
        """The continued nodes, told to the drafter; they get the next places in its memory."""
        fed, width = self._sees.shape[2], self.width
        self._kept.scatter_(
            1, self._frontier, torch.arange(fed, fed + width, device=self._kept.device).expand_as(self._frontier)
        )
        own = torch.eye(width, dtype=torch.bool, device=self._kept.device).expand(len(self._rows), -1, -1)
        before = self._sees.gather(1, self._above[..., None].expand(-1, -1, fed))
        self._sees = torch.cat([before, own], dim=2)
        self._depths = torch.cat([self._depths, torch.full_like(self._frontier, depth - 1)], dim=1)
        starts = [place + fed for place in self._places]
        branches = Branches(self._places, self._depths, self._sees)
        return Level(depth, self._tokens.gather(1, self._frontier), self._above, starts, branches)

    def proposal(self) -> Proposal:
        """The best nodes found; a node is never better than its parent."""
        values, count = self._values.double(), self._values.shape[1]
        order = torch.arange(count, device=values.device)
        best = (values - TIE * order).topk(min(self._shape.nodes, count), dim=1).indices
        real = values.gather(1, best) > NEVER
        best = (best + count * ~real).sort(dim=1).values  # in the order in which they were found, the unreal ones last
        lengths = real.sum(1).tolist()
        best = best[:, : max(lengths)]
        real, best = best < count, best % count
        new = torch.full_like(self._parents, -1).scatter_(1, best, torch.where(real, order[: best.shape[1]], -1))
        parents = self._parents.gather(1, best)
        parents = torch.where(parents < 0, -1, new.gather(1, parents.clamp_min(0)))
        tokens = self._tokens.gather(1, best)
        return Proposal(tokens, self._choosing.drawn(tokens, best), parents, lengths, self._kept.gather(1, best))

    def _add(self, children: Children, depth: int) -> None:
        """Note the found children [B, w, m], and which of them are continued."""
        width, most = children.tokens.shape[1:]
        values = torch.where((self._limits >= depth)[:, None, None], children.values, NEVER).flatten(1)
        base = self._tokens.shape[1]
        parents = self._frontier[..., None].expand(-1, -1, most).flatten(1)
        self._tokens = torch.cat([self._tokens, children.tokens.flatten(1)], dim=1)
        self._parents = torch.cat([self._parents, parents], dim=1)
        self._values = torch.cat([self._values, values], dim=1)
        self._kept = torch.cat([self._kept, torch.full_like(parents, -1)], dim=1)
        if self._form is None:
            chosen = values.topk(min(self._shape.branches, width * most), dim=1).indices
        else:
            chosen = self._form.continued(depth - 1).to(values.device).expand(len(values), -1)
        self._above = chosen // most
        self._value = values.gather(1, chosen)
        self._frontier = base + chosen

    def _paths(self, depth: int) -> list[list[list[int]]]:
        """By row, the tokens on the way to each continued node; empty for rows that no path matters to."""
        if not depth:
            return [[[]] for _ in self._rows]
        tokens, parents, frontier = self._tokens.tolist(), self._parents.tolist(), self._frontier.tolist()
        return [
            [path(tokens[i], parents[i], node) for node in frontier[i]] if row.sampler.adjusts else []
            for i, row in enumerate(self._rows)
        ]


def path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens from the root to a node, its own the last."""
    found = []
    while node >= 0:
        found.append(tokens[node])
        node = parents[node]
    return found[::-1]


class _Form:
    """A fixed form, by level: which children the continued nodes have, and which of those are continued."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.branches: list[int] = []  # most children of a node, by level
        self._slots: list[Tensor] = []
        self._continued: list[Tensor] = []
        level = [-1]
        while level:
            ranked = [[node for node, parent in enumerate(parents) if parent == above] for above in level]
            most = max(map(len, ranked))
            if not most:
                break
            self.branches.append(most)
            self._slots.append(torch.tensor([[rank < len(children) for rank in range(most)] for children in ranked]))
            places = {node: at * most + rank for at, nodes in enumerate(ranked) for rank, node in enumerate(nodes)}
            level = [node for node in places if node in parents]
            self._continued.append(torch.tensor([places[node] for node in level], dtype=torch.long))

    def slots(self, level: int) -> Tensor:
        """Bool [w, m]: the children that there are."""
        return self._slots[level]

    def continued(self, level: int) -> Tensor:
        """Places [w'] among the w * m children."""
        return self._continued[level]
