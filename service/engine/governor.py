"""The governor: before each round it chooses the draft length with the most accepted progress, 0 for plain decoding.

All rows of a round share one padded verification, so one draft length is best for all of them: the one with the
most expected committed tokens (survival) per predicted millisecond (costs). Trees are further choices, numbered after
the longest chain, and after them lookups, which are for rows with n-gram matches. What is not played now and then goes
out of date, so a small share of the time is spent on probes.
It never sees a token: a choice that looked at the proposal would bias the output.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from threading import Lock

from service.engine.choice import Choice
from service.engine.costs import Costs, Played, bucket
from service.engine.forms import Forms
from service.engine.lookups import Match
from service.engine.probes import Plan, Probes
from service.engine.shapes import Shapes
from service.engine.situation import Batch, Seen, Standing
from service.engine.survival import RowClass
from storage.config import setting

__all__ = ["Choice", "Governor", "GovernorConfig", "Played", "RowClass"]

PLAIN_FIRST = 3  # plain rounds at a batch size before anything is judged against them
YOUNG = 8  # plain rounds at a batch size before a further one must be affordable
MARGIN = 1.02  # speculating must promise more than plain decoding by this factor, or less by it, to be taken up or left
FINER = 1.005  # and one draft length more than another
CLEAR = 1.10  # what promises more by this factor is taken at once
CLOSE = 0.8  # of the best choice's progress, that a tree must promise to be tried now and then
DWELL = 8  # rounds that a choice stands otherwise
HOLD = 4  # rounds after which the same batch is thought over again
BURST_ROWS, BURST_ROUNDS = 8, 3  # a probe of a drafter that is off: rows that it should see, rounds at least
LEARNED = 8  # proposals of a drafter before it is said to be known
SHOWN = 64  # classes and batch sizes that decisions are given for


@dataclass(frozen=True)
class GovernorConfig:
    """When to speculate."""

    governor: bool = setting(True, "choose the draft length by measured progress; false: always the longest")
    probe_share: float = setting(0.01, "share of the time that may be lost to probing other draft lengths")


class Governor:
    """Chooses among `shapes`. `decisions` may be called from any thread."""

    def __init__(self, shapes: Shapes, config: GovernorConfig) -> None:
        self._shapes, self._config, self._limit = shapes, config, shapes.longest
        sizes = {choice: shapes.size(choice) for choice in range(shapes.longest + 1, shapes.choices)}
        self._costs, self._survival = Costs(sizes), Forms(shapes)
        self._probes = Probes(config.probe_share)
        self._rows: list[RowClass] = []  # of the last choice
        self._batch = Batch.of((), False)
        self._sampled = True  # whether the last rows above temperature 0 were
        self._standings: dict[tuple[int, frozenset[Match]], Standing] = {}
        self._standing, self._worth = Standing(), 0.0  # for this batch, and the tokens a millisecond of its best
        self._asked = False  # whether the round that is being played was chosen here
        self._plain_tried: Counter[tuple[int, bool]] = Counter()  # by batch bucket, sampled
        self._round, self._thought = 0, 0  # rounds so far, and at the last thought
        self._seen: dict[tuple[RowClass, int], Seen] = {}
        self._lock = Lock()

    def choose(self, rows: Sequence[RowClass]) -> int:
        """The draft length of the next round."""
        if not self._config.governor or self._limit == 0 or not rows:
            return self._shapes.largest
        with self._lock:
            if self._due(rows):
                self._think()
            self._asked = True
            return self._probes.draft_length if self._probes.running else self._standing.best

    def observe(self, played: Played) -> None:
        """Learn from a round, chosen here or not."""
        with self._lock:
            self._round += 1
            if self._asked and self._worth > 0:
                self._probes.account(self._costs.charge(played), played.committed, self._worth, played.width > 0)
            self._asked = False
            if any(row_class.policy != "greedy" for row_class, _, _ in played.rows):
                self._sampled = played.sampled
            self._costs.observe(played)
            for row_class, proposed, accepted in played.rows:
                self._survival.see(row_class, played.width, proposed, accepted)
            for row_class, proposed, accepted in played.by_match:
                self._survival.see_match(row_class, proposed, accepted)
            self._note(played)

    def rearm(self) -> None:
        """Another drafter: what was known of the last one says nothing of it; the machine is the same."""
        with self._lock:
            self._survival.swapped()
            self._costs.swapped()
            self._probes.stop()
            self._rows = []

    def decisions(self) -> list[Choice]:
        """What is chosen for each class and batch size seen lately, and why."""
        with self._lock:
            keys = list(self._seen) if self._limit else []
        choices = []
        for key in keys:
            with self._lock:  # for one at a time, so that a round waits for no more
                if key in self._seen:
                    choices.append(self._choice(key[0], self._seen[key]))
        return sorted(choices, key=lambda c: (c.workload, c.policy, c.match, c.batch))

    def _due(self, rows: Sequence[RowClass]) -> bool:
        """Whether to choose anew: the batch is another, something was learned, or some rounds have passed."""
        same = rows == self._rows
        if same and self._round - self._thought < HOLD and not self._probes.running:
            return False
        before, self._rows, self._batch = self._batch, list(rows), Batch.of(rows, self._sampled)
        if len(rows) > 2 * before.size or self._batch.matches != before.matches:
            self._probes.stop()  # it would lose more than was set aside for it
        self._thought = self._round
        return True

    def _think(self) -> None:
        """Choose the best draft length, and a probe of another where one is affordable."""
        batch = self._batch
        standing = self._standings.setdefault((bucket(batch.size), batch.matches), Standing())
        self._standing = standing
        if self._plain_first(batch):
            self._probes.stop()
            standing.best, self._worth, self._thought = 0, 0.0, self._round - HOLD
            return
        progress = self._progress(batch, self._survival.expected)
        best, before = max(range(len(progress)), key=progress.__getitem__), standing.best
        gain, margin = progress[best] / progress[before], FINER if best and before else MARGIN
        if gain > CLEAR or (gain > margin and self._round - standing.changed >= DWELL):
            standing.best, standing.changed = best, self._round
            self._probes.stop()
        self._worth = progress[standing.best]
        if standing.best > 0 and self._plain_young(batch):
            self._probes.start(Plan(0, 1, 0.0))
        elif not self._probes.running and self._probes.offer(self._plan(progress)) and standing.best == 0:
            self._survival.fade(batch.classes)

    def _plain_first(self, batch: Batch) -> bool:
        """Whether plain rounds are still to be seen at this size; asked for only so often, as rows may have others."""
        key = (bucket(batch.size), batch.sampled)
        if self._plain_tried[key] >= PLAIN_FIRST or self._costs.played(batch.size, 0, batch.sampled) >= PLAIN_FIRST:
            return False
        self._plain_tried[key] += 1
        return True

    def _plain_young(self, batch: Batch) -> bool:
        """Whether the first plain rounds, which may have been slow, are to be checked: all is judged against them."""
        seen = self._costs.played(batch.size, 0, batch.sampled)
        return seen < YOUNG and self._costs.since(batch.size, 0, batch.sampled) >= 2 * DWELL

    def _progress(self, batch: Batch, expected: Callable[[RowClass], list[float]]) -> list[float]:
        """Tokens a millisecond that a batch commits by what is `expected` of its classes, by choice.

        0 for what is not for rows with such matches.
        """
        tokens = [0.0] * self._shapes.choices
        for row_class, count in batch.classes.items():
            for k, each in enumerate(expected(row_class)):
                tokens[k] += count * each
        return [
            t / self._costs.predict(batch.size, k, batch.sampled) if self._shapes.fits(k, batch.matches) else 0.0
            for k, t in enumerate(tokens)
        ]

    def _plan(self, progress: Sequence[float]) -> Plan:
        """The probe that is next: while speculating, of what was not played for longest; else of the drafter."""
        batch, best = self._batch, self._standing.best
        hoped = self._progress(batch, self._survival.hoped)
        if best > 0:
            others = self._neighbours(best, progress, hoped) - {best}
            k = max(others, key=lambda k: self._costs.since(batch.size, k, batch.sampled))
            return Plan(k, 1, self._loss(k, progress))
        k = max(range(1, self._shapes.choices), key=hoped.__getitem__)
        rounds = max(BURST_ROUNDS, ceil(BURST_ROWS / batch.size))
        return Plan(k, rounds, rounds * self._loss(k, progress) + self._costs.entry_ms(batch.size))

    def _neighbours(self, best: int, progress: Sequence[float], hoped: Sequence[float]) -> set[int]:
        """What is to be known beside the best choice: a little less and more of it, and others that may come close."""
        further = [k for k in range(self._limit + 1, self._shapes.choices) if hoped[k] > CLOSE * progress[best]]
        if best > self._limit:
            return {0, max(range(1, self._limit + 1), key=progress.__getitem__), *further}
        return {0, best - 1, min(best + 1, self._limit), min(best + best // 3, self._limit), *further}

    def _loss(self, k: int, progress: Sequence[float]) -> float:
        """Milliseconds that a round of draft length k is expected to lose against the best."""
        ms = self._costs.predict(self._batch.size, k, self._batch.sampled)
        return max(ms * (1 - progress[k] / progress[self._standing.best]), 0.0)

    def _note(self, played: Played) -> None:
        """Keep in mind what was played lately, for `decisions`."""
        for row_class in {row_class for row_class, _, _ in played.rows}:
            key = (row_class, bucket(played.batch))
            before = self._seen.pop(key, None)
            if before is None and len(self._seen) >= SHOWN:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = Seen(played.batch, played.sampled, before.rounds + 1 if before else 1)

    def _choice(self, row_class: RowClass, seen: Seen) -> Choice:
        batch = Batch(seen.batch, seen.sampled, {row_class: seen.batch})
        progress = self._progress(batch, self._survival.expected)
        speculative = max(range(1, self._shapes.choices), key=progress.__getitem__)
        shape = self._shapes.shape(speculative)
        speed_up = progress[speculative] / progress[0]
        return Choice(
            workload=row_class.workload,
            policy=row_class.policy,
            match=row_class.match,
            batch=seen.batch,
            draft_length=shape.depth if speed_up > 1 else 0,
            speculative=shape.depth,
            nodes=self._shapes.size(speculative).nodes,
            fixed=bool(shape.form),
            lookup=(lookup := self._shapes.lookup(speculative)) is not None,
            joined=lookup is not None and lookup.joined,
            survival=tuple(self._survival.cumulative(row_class, speculative)),
            speculative_ms=self._costs.predict(seen.batch, speculative, seen.sampled),
            plain_ms=self._costs.predict(seen.batch, 0, seen.sampled),
            speculative_progress=progress[speculative],
            plain_progress=progress[0],
            rounds=seen.rounds,
            why=self._why(row_class, seen, speed_up),
        )

    def _why(self, row_class: RowClass, seen: Seen, speed_up: float) -> str:
        if self._probes.running and row_class in self._batch.classes and self._batch.size == seen.batch:
            return "probing"
        speculated = any(self._costs.played(seen.batch, k, seen.sampled) for k in range(1, self._shapes.choices))
        if not speculated or self._survival.known < LEARNED:
            return "learning"
        return "on" if speed_up > 1 else f"off: plain is {1 / speed_up:.1f}x faster"
