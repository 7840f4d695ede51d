"""A model of a machine that plays rounds: measured verification times, noise, and a drafter of known quality.

No clock and no model: thousands of rounds take a second, and the same seed gives the same rounds.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from service.engine.governor import Governor, Played, RowClass
from service.engine.lookups import Lookup

WIDTHS = (1, 2, 3, 5, 9, 16)
BF16 = {
    1: (37, 38, 40, 43, 46, 55),
    4: (42, 46, 51, 59, 76, 110),
    8: (49, 56, 64, 81, 116, 172),
    16: (62, 76, 98, 127, 184, 300),
}
FP32 = {1: (53, 65, 75, 80, 88, 95), 8: (82, 98, 112, 155, 224, 341)}
Table = dict[int, tuple[int, ...]]
Truth = Callable[[int, RowClass], float]  # acceptance probability, by round and class


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between the points, and beyond them."""
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


def verify_ms(table: Table, batch: int, width: int) -> float:
    return between(list(table), [between(WIDTHS, row, width) for row in table.values()], batch)


@dataclass
class Total:
    """What some rounds come to on average: expected tokens, and milliseconds without the noise."""

    tokens: float = 0.0
    ms: float = 0.0

    @property
    def progress(self) -> float:
        return self.tokens / self.ms


@dataclass
class Machine:
    """Rows of given classes, each request replaced by another when it is done. `total` is free of the noise."""

    truth: Truth
    table: Table = field(default_factory=lambda: BF16)
    seed: int = 0
    noise: float = 0.08
    spikes: float = 0.02  # share of the rounds that a neighbour triples
    output: int = 128  # tokens of a request
    prompt: int = 100
    catch_up_ms: float = 0.05  # a token that a drafter catches up on
    load: Callable[[int], float] = lambda _: 1.0
    longest: int = 1_000  # chain; what comes after it are trees
    trees: Sequence[tuple[int, int, float]] = ()  # depth, tokens, and how many independent proposals a node is worth
    lookups: Sequence[Lookup] = ()  # what comes after the trees
    matched: float = 0.0  # acceptance probability of what followed a match
    cold: float = 1.0  # how much longer the first round of each choice takes
    round: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.behind: list[int] = []
        self.left: list[int] = []
        self.total = Total()
        self.played: set[int] = set()

    def play(self, rows: Sequence[RowClass], k: int) -> Played:
        """One round of draft length k."""
        self._seat(len(rows))
        self.round += 1
        absorbed = sum(self.behind) if k else 0
        nodes, wanted = self.shape(k)[1], [self._wanted(row, k) for row in rows]
        outcomes = tuple((row, len(each), self._accepted(each)) for row, each in zip(rows, wanted, strict=True))
        self._advance(outcomes)
        load = self.load(self.round)
        draft = (self._steps(rows, k) * (2 + 0.1 * len(rows)) + absorbed * self.catch_up_ms) * load if k else 0.0
        verify = verify_ms(self.table, len(rows), nodes + 1) * load
        self.total.tokens += sum(1 + sum(accumulate(each, mul)) for each in wanted)
        self.total.ms += draft + verify + 0.5
        slow = self.random.lognormvariate(0, self.noise) * (3 if self.random.random() < self.spikes else 1)
        slow *= 1.0 if k in self.played else self.cold
        self.played.add(k)
        sampled = any(row.policy != "greedy" for row in rows)
        by_match = self._by_match(outcomes, k)
        return Played(len(rows), k, draft * slow, verify * slow, 0.5, absorbed, sampled, outcomes, by_match)

    def shape(self, k: int) -> tuple[int, int, float]:
        if lookup := self._lookup(k):
            return lookup.shape.depth, lookup.nodes, 1.0
        return (k, k, 1.0) if k <= self.longest else self.trees[k - self.longest - 1]

    def _lookup(self, k: int) -> Lookup | None:
        at = k - self.longest - 1 - len(self.trees)
        return self.lookups[at] if at >= 0 else None

    def _wanted(self, row: RowClass, k: int) -> list[float]:
        """How likely each token of the row's proposal is accepted; of a tree of both, if either is right."""
        (depth, _, worth), lookup = self.shape(k), self._lookup(k)
        drafter = 1 - (1 - self.truth(self.round, row)) ** worth
        if lookup is None:
            return [drafter] * depth
        if not lookup.takes(row.match):
            return [drafter] * lookup.own.depth
        both = lookup.own.depth if lookup.joined else 0
        return [1 - (1 - drafter) * (1 - self.matched)] * both + [self.matched] * (depth - both)

    def _by_match(self, outcomes: Sequence[tuple[RowClass, int, int]], k: int) -> tuple[tuple[RowClass, int, int], ...]:
        """Of trees of both: a token that was accepted of either is the match's as often as it is right."""
        lookup = self._lookup(k)
        if lookup is None or not lookup.joined:
            return ()
        found = []
        for row, depth, accepted in outcomes:
            if lookup.takes(row.match):
                either = self._wanted(row, k)[:accepted]
                found.append((row, depth, self._accepted([self.matched / p if p else 0.0 for p in either])))
        return tuple(found)

    def _steps(self, rows: Sequence[RowClass], k: int) -> int:
        """Steps of drafting, for rows that are not left to their matches."""
        lookup = self._lookup(k)
        if lookup is None:
            return self.shape(k)[0]
        return lookup.own.depth if lookup.joined or any(not lookup.takes(row.match) for row in rows) else 0

    def swap(self) -> None:
        self.behind = [self.prompt + self.output - left for left in self.left]

    def _seat(self, batch: int) -> None:
        self.behind, self.left = self.behind[:batch], self.left[:batch]
        while len(self.left) < batch:
            self.behind.append(self.prompt)
            self.left.append(self.random.randint(1, self.output))

    def _accepted(self, probabilities: Sequence[float]) -> int:
        """How many are, one after another."""
        return next((at for at, each in enumerate(probabilities) if self.random.random() >= each), len(probabilities))

    def _advance(self, outcomes: Sequence[tuple[RowClass, int, int]]) -> None:
        for i, (_, k, accepted) in enumerate(outcomes):
            self.behind[i] = 1 if k else self.behind[i] + 1
            self.left[i] -= accepted + 1
            if self.left[i] <= 0:
                self.behind[i], self.left[i] = self.prompt, self.output


def governed(machine: Machine, governor: Governor, rows: Sequence[RowClass], rounds: int) -> list[int]:
    """Let the governor choose for some rounds; the draft lengths that it chose."""
    chosen = []
    for _ in range(rounds):
        chosen.append(governor.choose(rows))
        governor.observe(machine.play(rows, chosen[-1]))
    return chosen


def fixed(machine: Machine, rows: Sequence[RowClass], k: int, rounds: int) -> float:
    """Progress of the machine with one draft length throughout."""
    for _ in range(rounds):
        machine.play(rows, k)
    return machine.total.progress
