"""Which child of a node is accepted, by workload, depth and rank: what a tree's fixed form is fitted to.

A node's worth is the product of the shares on its way from the root; the form of n nodes with the most expected
accepted tokens is that of the n best, if depths are independent (Sequoia, Chen et al., arXiv 2402.12374, 3.1). What was
offered came from chains and grown trees too, so a deep or late child was mostly offered where the drafter was sure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

DECAY = 1 - 1 / 200  # a count's weight is gone after some hundred further ones
WORKLOADS = 64  # kept apart; the one not seen for longest is dropped
FIRST, NEXT = 0.6, 0.3  # share of first children, before anything is known, and of each further one in the one before
PRIOR = 4.0  # weight of that, in nodes

Tried = Sequence[tuple[int, int]]  # by depth: children of the node that was reached, and the accepted one's rank, or -1


@dataclass
class Counts:
    """Of one workload, by depth and rank: how often there was such a child, and how often it was the accepted one."""

    offered: list[list[float]]
    accepted: list[list[float]]


class Ranks:
    """Shares of accepted children for trees of up to `depth` and `branches`."""

    def __init__(self, depth: int, branches: int) -> None:
        self._depth, self._branches = depth, branches
        self._workloads: dict[str, Counts] = {}

    def see(self, workload: str, tried: Tried) -> None:
        """Note a row's round."""
        counts = self._workloads.pop(workload, None) or Counts(self._none(), self._none())
        if len(self._workloads) >= WORKLOADS:
            del self._workloads[next(iter(self._workloads))]
        self._workloads[workload] = counts
        for depth, (children, accepted) in enumerate(tried[: self._depth]):
            for rank in range(min(children, self._branches)):
                counts.offered[depth][rank] = counts.offered[depth][rank] * DECAY + 1
                counts.accepted[depth][rank] = counts.accepted[depth][rank] * DECAY + (rank == accepted)

    def form(self, rows: Mapping[str, int], nodes: int) -> tuple[int, ...]:
        """The parents of the tree that is best for so many rows of some workloads; ranks in order."""
        shares = [[self._share(rows, d, r) for r in range(self._branches)] for d in range(self._depth)]
        parents: list[int] = []
        best = [(-shares[0][0], 0, -1, 0, 0)]  # worth, order, parent, depth, rank
        while best and len(parents) < nodes:
            worth, _, parent, depth, rank = heappop(best)
            node = len(parents)
            parents.append(parent)
            if rank + 1 < self._branches:
                above = worth / shares[depth][rank]
                heappush(best, (above * shares[depth][rank + 1], 2 * node + 1, parent, depth, rank + 1))
            if depth + 1 < self._depth:
                heappush(best, (worth * shares[depth + 1][0], 2 * node + 2, node, depth + 1, 0))
        return tuple(parents)

    def _share(self, rows: Mapping[str, int], depth: int, rank: int) -> float:
        """Of the rows' mean; a further child never has more than the one before."""
        prior = FIRST * NEXT**rank
        total = sum(rows.values())
        mean = sum(count * self._of(workload, depth, rank, prior) for workload, count in rows.items()) / total
        return mean if rank == 0 else min(mean, self._share(rows, depth, rank - 1))

    def _of(self, workload: str, depth: int, rank: int, prior: float) -> float:
        counts = self._workloads.get(workload)
        if counts is None:
            return prior
        return (counts.accepted[depth][rank] + PRIOR * prior) / (counts.offered[depth][rank] + PRIOR)

    def _none(self) -> list[list[float]]:
        return [[0.0] * self._branches for _ in range(self._depth)]
