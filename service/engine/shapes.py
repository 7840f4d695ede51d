"""What is chosen among for a round, by number: plain decoding is 0, a chain of k tokens is k, then come trees, and
then rounds in which n-gram matches go first."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from adapter.drafters.protocol import Shape
from service.engine.fit import Size
from service.engine.lookups import Lookup, Match, lookups
from service.engine.ranks import Ranks

BRANCHES = 4  # nodes that a tree goes on from at each depth, and children of each, at most
SMALLEST = 8  # nodes of the smallest tree that is tried, where larger ones may be


@dataclass(frozen=True)
class Shapes:
    """Chains of up to `longest` tokens, trees, from the smallest to the largest, and lookups."""

    longest: int
    trees: tuple[Shape, ...] = ()  # grown by the drafter's confidence; each has a twin of a fixed form
    lookups: tuple[Lookup, ...] = ()

    @staticmethod
    def of(longest: int, nodes: int, ngram_first: bool = False, kept: int = 0) -> "Shapes":
        """Trees of up to `nodes` tokens as deep as the longest chain, each twice as large as the one before.

        Of each no more than `kept` tokens go through the whole of the target's pass; 0: all.
        """
        sizes, size = [], nodes
        while size > longest > 1 and (size >= SMALLEST or size == nodes):
            sizes.append(size)
            size //= 2
        trees = tuple(Shape(longest, size, BRANCHES, kept=kept) for size in reversed(sizes))
        return Shapes(longest, trees, lookups(longest, bool(trees)) if ngram_first else ())

    @cached_property
    def further(self) -> tuple[Shape, ...]:
        """The trees, grown and of fixed forms: the choices after the chains."""
        fixed = tuple(self.fitted(tree, Ranks(self.longest, BRANCHES), {"": 1}) for tree in self.trees)
        return (*self.trees, *fixed)

    @cached_property
    def choices(self) -> int:
        """How many there are."""
        return 1 + self.longest + len(self.further) + len(self.lookups)

    @property
    def largest(self) -> int:
        """The number of the largest tree, or of the longest chain where there are none."""
        return self.longest + len(self.trees)

    @property
    def places(self) -> int:
        """How many places after a row's last token any of them takes up in a memory."""
        shapes = [*self.trees, *(shape for lookup in self.lookups for shape in (lookup.shape, lookup.own))]
        return max([self.longest, *(shape.places for shape in shapes), *(lookup.nodes for lookup in self.lookups)])

    @staticmethod
    def fitted(tree: Shape, ranks: Ranks, rows: Mapping[str, int]) -> Shape:
        """The tree in the fixed form that is best for rows of some workloads."""
        return replace(tree, form=ranks.form(rows, tree.nodes))

    def shape(self, choice: int) -> Shape:
        """Of what is proposed; where matches go first, of what comes out of them."""
        if lookup := self.lookup(choice):
            return lookup.shape
        return Shape.chain(choice) if choice <= self.longest else self.further[choice - self.longest - 1]

    def lookup(self, choice: int) -> Lookup | None:
        """How n-gram matches go first, where they do."""
        at = choice - 1 - self.longest - len(self.further)
        return self.lookups[at] if at >= 0 else None

    def size(self, choice: int) -> Size:
        """What it costs by: matches are found without a step of drafting."""
        shape, lookup = self.shape(choice), self.lookup(choice)
        return Size(shape.depth, shape.nodes) if lookup is None else Size(lookup.own.depth, lookup.nodes)

    def fits(self, choice: int, matches: Collection[Match]) -> bool:
        """Whether it may be chosen for rows with these matches."""
        lookup = self.lookup(choice)
        return lookup is None or lookup.fits(matches)
