"""The line that the governor lays through the measured rounds, to predict those that were never played.

A round costs something in itself, for each row, for each step of drafting, and for each proposed token (which is
drafted and verified), and more where rows are sampled. Each share is at least 0, and starts from a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GUESS = (1.0, 0.02, 0.03, 0.015, 0.002)  # shares, relative to what a round costs in itself
TRUST = 0.05  # of the guess, against one point's relative error
SURE = 4  # rounds after which a point has full weight
SWEEPS = 30


class Size(NamedTuple):
    """What a proposal costs by: steps of drafting, and proposed tokens a row."""

    depth: int
    nodes: int


@dataclass(frozen=True)
class Point:
    """A measured mean."""

    batch: float
    size: Size
    sampled: bool
    ms: float
    rounds: int


@dataclass(frozen=True)
class Fit:
    shares: tuple[float, ...] = GUESS

    def ms(self, batch: float, size: Size, sampled: bool) -> float:
        return sum(s * f for s, f in zip(self.shares, features(batch, size, sampled), strict=True))


def features(batch: float, size: Size, sampled: bool) -> tuple[float, ...]:
    """What a round has of each share."""
    tokens = batch * size.nodes
    return (1.0, batch, size.depth, tokens, tokens + batch if sampled else 0.0)


def fitted(points: Sequence[Point]) -> Fit:
    """Non-negative least squares on the relative errors, drawn towards the guess."""
    guess = Fit()
    base = sum(p.ms / guess.ms(p.batch, p.size, p.sampled) for p in points) / len(points)
    shares = [base * share for share in GUESS]
    gram = [[TRUST / a**2 if i == j else 0.0 for j in range(len(shares))] for i, a in enumerate(shares)]
    right = [TRUST / share for share in shares]
    for point in points:
        weight = min(point.rounds, SURE) / SURE
        row = [f / point.ms for f in features(point.batch, point.size, point.sampled)]
        for i, a in enumerate(row):
            right[i] += weight * a
            for j, b in enumerate(row):
                gram[i][j] += weight * a * b
    return Fit(tuple(_descend(gram, right, shares)))


def _descend(gram: list[list[float]], right: list[float], shares: list[float]) -> list[float]:
    """Minimise over each share in turn, from `shares` on."""
    for _ in range(SWEEPS):
        for i, line in enumerate(gram):
            rest = right[i] - sum(a * x for a, x in zip(line, shares, strict=True)) + line[i] * shares[i]
            shares[i] = max(rest / line[i], 0.0)
    return shares
