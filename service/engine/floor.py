"""The floor right after a swap: a drafter that proposes nonsense is out after some rounds, without asking anybody.

The engine tells each round; where the new version is far below what its predecessor did on the same kind of
traffic, the engine goes back by itself before the next round, and the live follower moves the pointer after it.
What is less bad than that is left to the watch, which compares and takes its time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import comb

from service.engine.survival import RowClass
from storage.config import setting

FIRST_SHARE = 0.25  # of rounds that accept something, of a predecessor that was not seen
CHANCE = 0.005  # that rounds as bad as these were only bad luck, by the predecessor's own figures
REQUESTS = 3  # that a version must have seen before it is blamed for less than nonsense: one can be odd
KNOWN = 32  # rounds of the predecessor that say something
KINDS = 64  # workloads and policies that are told apart; clients choose them freely
FORGET = 2048  # rounds after which counts are halved, so that they follow the traffic


@dataclass(frozen=True)
class FloorConfig:
    """When a version is taken back right after its promotion."""

    floor_rounds: int = setting(16, "proposals that a new version makes before it is judged; 0: no floor")
    floor_until: int = setting(256, "proposals after which the floor leaves a new version to the watch")
    floor_length: float = setting(1.05, "acceptance length below which a new version is taken back at once")
    floor_share: float = setting(0.5, "share of its predecessor's acceptance length below which it is, too")


@dataclass(frozen=True)
class Broken:
    """A version that is to be taken back, and why."""

    version: int
    reason: str


@dataclass(frozen=True)
class Proposed:
    """What one row did in a round with a proposal."""

    request_id: str
    row_class: RowClass
    version: int
    proposed: int
    accepted: int


@dataclass
class Counts:
    """Rounds by how deep they went: `tried[j]` proposed more than j tokens, `kept[j]` of these accepted them."""

    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        missing = proposed - len(self.tried)
        self.tried += [0.0] * missing
        self.kept += [0.0] * missing
        for j in range(proposed):
            self.tried[j] += 1
            self.kept[j] += j < accepted
        if self.rounds > FORGET:
            self.tried, self.kept = [t / 2 for t in self.tried], [t / 2 for t in self.kept]

    @property
    def rounds(self) -> float:
        return self.tried[0] if self.tried else 0.0

    def accepting(self, depth: int) -> float:
        """The tokens that a round of this many proposals is expected to accept."""
        return sum(k / t for k, t in zip(self.kept[:depth], self.tried[:depth], strict=True) if t)


@dataclass
class Trial:
    """A new version's first rounds, and what its predecessor would have done in them."""

    version: int
    predecessor: int
    rounds: int = 0
    accepted: int = 0
    hits: int = 0  # rounds that accepted something
    compared: int = 0  # rounds of kinds in which the predecessor is known; the next three are of these
    got: int = 0  # tokens accepted
    expected: float = 0.0  # tokens that the predecessor is expected to have accepted
    expected_hits: float = 0.0  # rounds in which it is expected to have accepted something
    requests: set[str] = field(default_factory=set)

    @property
    def length(self) -> float:
        return 1 + self.accepted / self.rounds


class Floor:
    """The engine's thread writes; `broken` may be read by any."""

    def __init__(self, config: FloorConfig) -> None:
        self._config = config
        self._known: dict[int, dict[RowClass, Counts]] = {}  # by version
        self._trial: Trial | None = None
        self.broken: Broken | None = None

    def swapped(self, version: int, predecessor: int, guarded: bool) -> None:
        """Another version proposes; `guarded` where it is new, and not one that was gone back to."""
        self._trial = Trial(version, predecessor) if guarded and self._config.floor_rounds else None
        self._known = {v: counts for v, counts in self._known.items() if v in (version, predecessor)}
        self.broken = None

    def note(self, rows: Sequence[Proposed]) -> Broken | None:
        """Count a round; a version that this round has shown to be broken, once."""
        for row in rows:
            if self._trial is not None and row.version == self._trial.version:
                self._try(self._trial, row)
            self._know(row)
        return None if self._trial is None else self._judge(self._trial)

    def failed(self, versions: Collection[int]) -> Broken | None:
        """These versions' drafters raised an error: one on trial is broken, whatever it would have proposed."""
        if self._trial is not None and self._trial.version in versions:
            rounds = self._trial.rounds
            self.broken = Broken(
                self._trial.version, f"failed right after the swap, after {rounds} rounds: see its log"
            )
            self._trial = None
            return self.broken
        return None

    def _know(self, row: Proposed) -> None:
        kinds = self._known.setdefault(row.version, {})
        if row.row_class in kinds or len(kinds) < KINDS:
            kinds.setdefault(row.row_class, Counts()).add(row.proposed, row.accepted)

    def _try(self, trial: Trial, row: Proposed) -> None:
        trial.rounds += 1
        trial.accepted += row.accepted
        trial.hits += row.accepted > 0
        trial.requests.add(row.request_id)
        before = self._known.get(trial.predecessor, {}).get(row.row_class)
        if before is not None and before.rounds >= KNOWN:
            trial.compared += 1
            trial.got += row.accepted
            trial.expected += before.accepting(row.proposed)
            trial.expected_hits += before.accepting(1)
        else:
            trial.expected_hits += FIRST_SHARE

    def _judge(self, trial: Trial) -> Broken | None:
        """Whether the trial is over, and how."""
        config = self._config
        if trial.rounds < config.floor_rounds:
            return None
        reason = self._nonsense(trial) or self._fallen(trial)
        if reason and likely(trial.hits, trial.rounds, trial.expected_hits / trial.rounds) < CHANCE:
            self.broken = Broken(trial.version, reason)
        if self.broken is not None or trial.rounds >= config.floor_until:
            self._trial = None
        return self.broken

    def _nonsense(self, trial: Trial) -> str:
        if trial.length >= self._config.floor_length:
            return ""
        return (
            f"below the floor right after the swap: acceptance length {trial.length:.2f} in its first {trial.rounds} "
            f"rounds, under {self._config.floor_length:g}"
        )

    def _fallen(self, trial: Trial) -> str:
        enough = trial.compared >= 2 * self._config.floor_rounds and len(trial.requests) >= REQUESTS
        if not enough:
            return ""
        length, before = (1 + tokens / trial.compared for tokens in (trial.got, trial.expected))
        if length >= self._config.floor_share * before:
            return ""
        return (
            f"below the floor right after the swap: acceptance length {length:.2f} in {trial.compared} rounds of "
            f"{len(trial.requests)} requests, under {self._config.floor_share:g} of its predecessor's {before:.2f}"
        )


def likely(hits: int, rounds: int, share: float) -> float:
    """The chance of at most so many hits in independent rounds that hit with probability `share`."""
    share = min(share, 1.0)
    return sum(comb(rounds, n) * share**n * (1 - share) ** (rounds - n) for n in range(hits + 1))
