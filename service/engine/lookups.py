"""N-gram matches before a drafter's own proposals, or beside them: which rows have one, and what a round makes of them.

Whether a row's last tokens stood before, and how many of them, is known from its text alone, before anything is
proposed. So the governor may go by it, as it goes by the workload: a choice that looked at proposed tokens would bias
the output, one that looks at the text so far does not.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from adapter.drafters.protocol import Shape

Match = Literal["none", "short", "long"]

SURE = 5  # tokens of a long match
WIDEST = 15  # tokens proposed out of matches; with the last one before them, what CPUs multiply at once (AMX: 16 rows)
BRANCHES = 4  # of them that follow one token at most
SHARED = 7  # of them that are the drafter's, where one tree holds both

NOTHING = Shape.chain(0)


@dataclass(frozen=True)
class Lookup:
    """A round in which matches count."""

    shape: Shape  # of what is proposed out of a row's matches
    own: Shape = NOTHING  # of what the drafters of the other rows propose; nothing: those are decoded plainly
    joined: bool = False  # whether rows with a match have their drafter's proposal too, in one tree with the match's

    @property
    def nodes(self) -> int:
        """Tokens a row at most."""
        return self.shape.nodes + self.own.nodes if self.joined else self.shape.nodes

    def takes(self, match: Match) -> bool:
        """Whether a row's match counts; a short one does not where the drafter would have to stand back for it."""
        return match == "long" or (match == "short" and not self._stands_back)

    def fits(self, matches: Collection[Match]) -> bool:
        """Whether it is something of its own for rows with these matches, and no other choice by another name."""
        if self._stands_back:
            return "long" in matches and len(matches) > 1
        return any(self.takes(match) for match in matches)

    @property
    def _stands_back(self) -> bool:
        """Whether drafters propose, but not for rows whose match counts."""
        return self.own != NOTHING and not self.joined


def lookups(longest: int, trees: bool) -> tuple[Lookup, ...]:
    """A chain as deep as the longest one, and as many tokens as are nearly free: alone, beside drafters, and with them.

    trees: whether drafters may propose any.
    """
    if longest == 0:
        return ()
    shapes = [Shape.chain(longest)]
    if longest < WIDEST - 1:
        shapes.append(Shape(WIDEST - 1, WIDEST, BRANCHES))  # as deep as what followed agrees
    apart = [Lookup(shape, own) for own in (NOTHING, Shape.chain(longest)) for shape in shapes]
    if longest > SHARED:
        return tuple(apart)
    own = Shape(longest, SHARED, BRANCHES) if trees and longest < SHARED else Shape.chain(longest)
    return (*apart, Lookup(Shape(WIDEST - 1, WIDEST - own.nodes, BRANCHES), own, joined=True))


def match_of(tokens: int) -> Match:
    """What a match of so many tokens counts as."""
    return "long" if tokens >= SURE else "short" if tokens else "none"
