"""N-gram matches before a drafter's own proposals: which rows have one, and what a round makes of them.

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


@dataclass(frozen=True)
class Lookup:
    """A round in which matches go first."""

    shape: Shape  # of what is proposed out of a row's matches
    own: int  # draft length of the drafters of rows without a long match; 0: short ones count too, others are plain

    def takes(self, match: Match) -> bool:
        """Whether a row's match goes before its drafter."""
        return match == "long" or (match == "short" and self.own == 0)

    def fits(self, matches: Collection[Match]) -> bool:
        """Whether it is something of its own for rows with these matches, and no other choice by another name."""
        if self.own == 0:
            return any(self.takes(match) for match in matches)
        return "long" in matches and len(matches) > 1


def lookups(longest: int) -> tuple[Lookup, ...]:
    """A chain as deep as the longest one, and as many tokens as are nearly free; each alone, and beside drafters."""
    if longest == 0:
        return ()
    shapes = [Shape.chain(longest)]
    if longest < WIDEST - 1:
        shapes.append(Shape(WIDEST - 1, WIDEST, BRANCHES))  # as deep as what followed agrees
    return tuple(Lookup(shape, own) for own in (0, longest) for shape in shapes)


def match_of(tokens: int) -> Match:
    """What a match of so many tokens counts as."""
    return "long" if tokens >= SURE else "short" if tokens else "none"
