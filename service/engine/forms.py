"""Survival by choice: what the governor expects of each shape that it chooses among, for rows of a class."""

from collections.abc import Callable, Iterable
from functools import partial

from service.engine.shapes import Shapes
from service.engine.survival import RowClass, Survival


class Forms:
    """An estimate for all chains, as a longer one begins as a shorter one does, one for each tree, one for matches.

    What is proposed out of matches is one text, in more or fewer tokens: whichever is played tells of all. Where a tree
    holds a drafter's proposal too, there is an estimate for both together.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._deepest = max((lookup.shape.depth for lookup in shapes.lookups), default=0)
        self._matches = Survival(self._deepest)
        self.swapped()

    def swapped(self) -> None:
        """Another drafter: nothing is known of it, while n-gram matches are what they were."""
        self._chain = Survival(self._shapes.longest)
        self._trees = [Survival(shape.depth, self._chain.as_tree) for shape in self._shapes.further]
        self._joined = Survival(self._deepest, partial(self._chain.beside, self._matches))

    def see(self, row_class: RowClass, choice: int, proposed: int, accepted: int) -> None:
        """Note a row's round."""
        self._of(row_class, choice).see(row_class, proposed, accepted)

    def see_match(self, row_class: RowClass, proposed: int, accepted: int) -> None:
        """Note what a row's match would have done without the drafter's proposal in the same tree."""
        self._matches.see(row_class, proposed, accepted)

    @property
    def known(self) -> float:
        """The weight of what is known of the drafter's first position, or of the matches'."""
        return max(survival.known for survival in self._all())

    def fade(self, classes: Iterable[RowClass]) -> None:
        """Make ready for a probe: what it finds is to count against what was known before."""
        for survival in self._all():
            survival.fade(classes)

    def cumulative(self, row_class: RowClass, choice: int) -> list[float]:
        """P(at least j tokens accepted), j = 1, 2, ..., of the choice's kind."""
        survival, lookup = self._of(row_class, choice).cumulative(row_class), self._shapes.lookup(choice)
        return survival if lookup is None else survival[: lookup.shape.depth]

    def expected(self, row_class: RowClass) -> list[float]:
        """Tokens that a round is expected to commit, by choice."""
        return self._by_choice(row_class, lambda survival: survival.expected(row_class))

    def hoped(self, row_class: RowClass) -> list[float]:
        """The same where the drafter is as good as the counts do not rule out."""
        return self._by_choice(row_class, lambda survival: survival.hoped(row_class))

    def _by_choice(self, row_class: RowClass, tokens: Callable[[Survival], list[float]]) -> list[float]:
        """`tokens` gives them by depth."""
        told = {survival: tokens(survival) for survival in self._all()}
        return [told[self._of(row_class, k)][self._depth(row_class, k)] for k in range(self._shapes.choices)]

    def _depth(self, row_class: RowClass, choice: int) -> int:
        """How deep a row's proposal goes."""
        lookup = self._shapes.lookup(choice)
        if lookup is None or lookup.joined or lookup.takes(row_class.match):
            return self._shapes.shape(choice).depth
        return lookup.own.depth

    def _of(self, row_class: RowClass, choice: int) -> Survival:
        if choice <= self._shapes.longest:
            return self._chain
        lookup = self._shapes.lookup(choice)
        if lookup is None:
            return self._trees[choice - self._shapes.longest - 1]
        if lookup.joined:
            return self._joined
        return self._matches if lookup.takes(row_class.match) else self._chain

    def _all(self) -> list[Survival]:
        return [self._chain, *self._trees, *([self._matches, self._joined] if self._shapes.lookups else [])]
