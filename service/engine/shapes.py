"""What the governor chooses among, by number: plain decoding is 0, a chain of k tokens is k, and then come trees."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from adapter.drafters.protocol import Shape
from service.engine.ranks import Ranks
from service.engine.survival import RowClass, Survival

BRANCHES = 4  # nodes that a tree goes on from at each depth, and children of each, at most
SMALLEST = 8  # nodes of the smallest tree that is tried, where larger ones may be


def shape_of(choice: int, longest: int, further: Sequence[Shape]) -> Shape:
    """A chain up to the longest one, and then what there is further."""
    return Shape.chain(choice) if choice <= longest else further[choice - longest - 1]


@dataclass(frozen=True)
class Shapes:
    """Chains of up to `longest` tokens, and trees, from the smallest to the largest."""

    longest: int
    trees: tuple[Shape, ...] = ()  # grown by the drafter's confidence; each has a twin of a fixed form
    combined: bool = False  # one more choice, the last: the longest chain, n-gram matches before the drafter's own

    @staticmethod
    def of(longest: int, nodes: int, combined: bool = False, kept: int = 0) -> "Shapes":
        """Trees of up to `nodes` tokens as deep as the longest chain, each twice as large as the one before.

        Of each no more than `kept` tokens go through the whole of the target's pass; 0: all.
        """
        sizes, size = [], nodes
        while size > longest > 1 and (size >= SMALLEST or size == nodes):
            sizes.append(size)
            size //= 2
        return Shapes(longest, tuple(Shape(longest, size, BRANCHES, kept=kept) for size in reversed(sizes)), combined)

    @cached_property
    def further(self) -> tuple[Shape, ...]:
        """The choices after the chains."""
        fixed = tuple(self.fitted(tree, Ranks(self.longest, BRANCHES), {"": 1}) for tree in self.trees)
        return (*self.trees, *fixed, *([Shape.chain(self.longest)] if self.combined else []))

    @property
    def largest(self) -> int:
        """The number of the largest tree, or of the longest chain where there are none."""
        return self.longest + len(self.trees)

    @property
    def places(self) -> int:
        """How many places after a row's last token any of them takes up in a memory."""
        return max([self.longest, *(tree.places for tree in self.trees)])

    @staticmethod
    def fitted(tree: Shape, ranks: Ranks, rows: Mapping[str, int]) -> Shape:
        """The tree in the fixed form that is best for rows of some workloads."""
        return replace(tree, form=ranks.form(rows, tree.nodes))

    def shape(self, choice: int) -> Shape:
        return shape_of(choice, self.longest, self.further)

    def looks_up(self, choice: int) -> bool:
        """Whether n-gram matches go first."""
        return self.combined and choice == self.longest + len(self.further)


class Forms:
    """Survival by choice: one for all chains, as a longer one begins as a shorter one does, and one for each other."""

    def __init__(self, longest: int, further: Sequence[Shape] = ()) -> None:
        self._longest, self._chain = longest, Survival(longest)
        self._further = [Survival(shape.depth, self._chain, not shape.is_chain) for shape in further]

    def see(self, row_class: RowClass, choice: int, proposed: int, accepted: int) -> None:
        """Note a row's round."""
        self._of(choice).see(row_class, proposed, accepted)

    @property
    def known(self) -> float:
        """The weight of what is known of the drafter's first position."""
        return max(survival.known for survival in self._all())

    def fade(self, classes: Iterable[RowClass]) -> None:
        """Make ready for a probe: what it finds is to count against what was known before."""
        for survival in self._all():
            survival.fade(classes)

    def cumulative(self, row_class: RowClass, choice: int) -> list[float]:
        """P(at least j tokens accepted), j = 1, 2, ..., of the choice's kind."""
        return self._of(choice).cumulative(row_class)

    def expected(self, row_class: RowClass) -> list[float]:
        """Tokens that a round is expected to commit, by choice."""
        return [*self._chain.expected(row_class), *(one.expected(row_class)[-1] for one in self._further)]

    def hoped(self, row_class: RowClass) -> list[float]:
        """The same where the drafter is as good as the counts do not rule out."""
        return [*self._chain.hoped(row_class), *(one.hoped(row_class)[-1] for one in self._further)]

    def _of(self, choice: int) -> Survival:
        return self._chain if choice <= self._longest else self._further[choice - self._longest - 1]

    def _all(self) -> list[Survival]:
        return [self._chain, *self._further]
