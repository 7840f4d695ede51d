"""One arm under traffic: meets requests with its live drafter, and learns from what they leave behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.answers import Segment
from benchmarks.curve import Played
from benchmarks.learner import Learner, Update
from benchmarks.traffic import Drafting, Point, play, probability
from storage.records import FeedbackRecord

TOGETHER = 4  # requests that one version meets before their feedback is taken in

Step = Callable[[int, str], None]  # so many requests are done, and where that is


@dataclass(frozen=True)
class Noted:
    """An update, and after which request of the whole run it was done."""

    arm: str
    workload: str
    request: int
    update: Update


class Online:
    """An arm on its way through the segments."""

    def __init__(self, arm: str, learner: Learner, k: int, step: Step = lambda count, line: None) -> None:
        self._arm, self._learner, self._k, self._step = arm, learner, k, step
        self._drafting = self._live()
        self._met = 0
        self.noted: list[Noted] = []

    def run(self, segments: Sequence[Segment]) -> list[Played]:
        """All segments in order; then the held-out requests of all once more."""
        played = [self._segment(part) for part in segments]
        last = self._drafting.drafter
        return [
            replace(p, held_out_at_end=probability(last, part.held_out))
            for p, part in zip(played, segments, strict=True)
        ]

    def _segment(self, part: Segment) -> Played:
        points: list[Point] = []
        done = len(self.noted)
        for start in range(0, len(part.stream), TOGETHER):
            points += self._meet(part.workload, part.stream[start : start + TOGETHER])
            self._step(len(points) - start, f"{self._arm}: {part.workload}, request {len(points)}")
        updates = [noted.update for noted in self.noted[done:]]
        after = probability(self._drafting.drafter, part.held_out)
        return Played(
            workload=part.workload,
            points=tuple(points),
            held_out_after=after,
            held_out_at_end=after,
            updates=len(updates),
            promotions=sum(update.outcome == "promoted" for update in updates),
            training_seconds=sum(update.training_seconds for update in updates),
        )

    def _meet(self, workload: str, answers: Sequence[FeedbackRecord]) -> list[Point]:
        """A few requests: first how they went, then what is learnt from them."""
        met = [play(self._drafting, answer) for answer in answers]
        updates = self._learner.take_in([record for record, _ in met])
        self._met += len(met)
        self.noted += [Noted(self._arm, workload, self._met, update) for update in updates]
        if updates:
            self._drafting = self._live()
        return [point for _, point in met]

    def _live(self) -> Drafting:
        number, drafter = self._learner.live()
        return Drafting(self._arm, number, drafter, self._k)
