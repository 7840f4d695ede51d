"""How likely a drafter's tokens are accepted, by class of row and by position: the governor's view of the drafter.

Counts are decayed as they are added to, so that the estimates follow a drift of the traffic. A class that is
new starts from what all classes do together, and they from a hopeful prior: a drafter is tried, not presumed bad.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from service.engine.lookups import Match

CLASSES = 64  # kept apart; clients choose workloads freely, so the one not seen for longest is dropped
DECAY = 1 - 1 / 100  # a count's weight is gone after some hundred further ones at its position
PRIOR, PRIOR_WEIGHT = 0.8, 2.0  # probability and weight, before anything is known of a drafter
POOL_WEIGHT = 3.0  # of all classes' estimate in a class's own
HOPE = 2.0  # further acceptances that the optimistic estimate imagines
BRANCHING = 1.5  # independent proposals that a tree's node is taken to be worth, before it was tried
STALE_WEIGHT = 8.0  # what old counts may weigh against a probe's


@dataclass(frozen=True)
class RowClass:
    """What rows are told apart by."""

    workload: str
    policy: str  # its bucket
    lossless: bool = True  # what is accepted leniently says nothing of other classes
    match: Match = "none"  # whether the text's last tokens stood before, where n-grams are looked up


@dataclass
class Counts:
    """Decayed trials and acceptances by position; a trial is a position whose predecessors were all accepted."""

    trials: list[float]
    hits: list[float]

    def add(self, proposed: int, accepted: int) -> None:
        for position in range(min(accepted + 1, proposed, len(self.trials))):
            self.trials[position] = self.trials[position] * DECAY + 1.0
            self.hits[position] = self.hits[position] * DECAY + (position < accepted)

    def fade(self, weight: float) -> None:
        """Keep the estimates, but let them weigh no more than `weight` trials."""
        for position, trials in enumerate(self.trials):
            if trials > weight:
                self.hits[position] *= weight / trials
                self.trials[position] = weight


class Survival:
    """Acceptance probabilities of one drafter version, for draft lengths up to `limit`; by depth for a tree's size."""

    def __init__(self, limit: int, like: Callable[[], Sequence[float]] = tuple) -> None:
        """At first its tokens are taken to be accepted as likely as those that `like` tells of, by depth."""
        self._limit, self._like = limit, like
        self._pool = self._none()
        self._classes: dict[RowClass, Counts] = {}  # least recently seen first

    def see(self, row_class: RowClass, proposed: int, accepted: int) -> None:
        """Note a row's round."""
        if proposed == 0:
            return
        counts = self._classes.pop(row_class, None) or self._none()
        if len(self._classes) >= CLASSES:
            del self._classes[next(iter(self._classes))]
        self._classes[row_class] = counts
        counts.add(proposed, accepted)
        if row_class.lossless:
            self._pool.add(proposed, accepted)

    @property
    def known(self) -> float:
        """The weight of what is known of the drafter's first position."""
        return self._pool.trials[0]

    def fade(self, classes: Iterable[RowClass]) -> None:
        """Make ready for a probe: what it finds is to count against what was known before."""
        for row_class in classes:
            if row_class in self._classes:
                self._classes[row_class].fade(STALE_WEIGHT)
        self._pool.fade(STALE_WEIGHT)

    def cumulative(self, row_class: RowClass) -> list[float]:
        """P(at least j tokens accepted), j = 1..limit."""
        return _products(self._conditional(row_class))

    def expected(self, row_class: RowClass) -> list[float]:
        """Tokens that a round is expected to commit, by draft length 0..limit."""
        return _sums(self.cumulative(row_class))

    def hoped(self, row_class: RowClass) -> list[float]:
        """The same where the drafter is as good as the counts do not rule out."""
        counts = self._classes.get(row_class, self._pool)
        hopeful, known = [], POOL_WEIGHT
        for probability, trials in zip(self._conditional(row_class), counts.trials, strict=True):
            known = POOL_WEIGHT + trials if trials > 0 else known  # not seen: as sure as of the position before
            hopeful.append((probability * known + HOPE) / (known + HOPE))
        return _sums(_products(hopeful))

    def _conditional(self, row_class: RowClass) -> list[float]:
        """P(token j accepted | the ones before it were), j = 1..limit."""
        counts = self._classes.get(row_class)
        if counts is None:
            return self._pooled()
        conditional: list[float] = []
        for pooled, trials, hits in zip(self._pooled(), counts.trials, counts.hits, strict=True):
            centre = (pooled + conditional[-1]) / 2 if conditional else pooled
            conditional.append((hits + POOL_WEIGHT * centre) / (trials + POOL_WEIGHT))
        return conditional

    def as_tree(self) -> list[float]:
        """What a tree of it is taken for: P(token j accepted | the ones before it were) for all rows."""
        return [1 - (1 - p) ** BRANCHING for p in self._pooled()]

    def beside(self, other: "Survival") -> list[float]:
        """What a tree is taken for that holds what `other` tells of, too: that either is right."""
        pairs = zip_longest(self._pooled(), other._pooled(), fillvalue=0.0)
        return [1 - (1 - p) * (1 - q) for p, q in pairs]

    def _pooled(self) -> list[float]:
        conditional, before, likely = [], PRIOR, self._like()
        for at, (trials, hits) in enumerate(zip(self._pool.trials, self._pool.hits, strict=True)):
            before = likely[at] if at < len(likely) else before
            before = (hits + PRIOR_WEIGHT * before) / (trials + PRIOR_WEIGHT)
            conditional.append(before)
        return conditional

    def _none(self) -> Counts:
        return Counts([0.0] * self._limit, [0.0] * self._limit)


def _products(conditional: Sequence[float]) -> list[float]:
    products, product = [], 1.0
    for probability in conditional:
        product *= probability
        products.append(product)
    return products


def _sums(cumulative: Sequence[float]) -> list[float]:
    sums = [1.0]  # the next token
    for probability in cumulative:
        sums.append(sums[-1] + probability)
    return sums
