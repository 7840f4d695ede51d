"""What to propose in the next round: what each row's request asks for, or the governor's choice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adapter.drafters.protocol import Shape
from service.engine.generation import Row
from service.engine.governor import Governor, Played, RowClass
from service.engine.lookups import NOTHING, Lookup, Match
from service.engine.ranks import Ranks
from service.engine.rounds import Plan, RoundResult
from service.engine.shapes import BRANCHES, Shapes
from storage.records import LOSSY


class Pace:
    """Chooses among `shapes`; the largest where there is no governor."""

    def __init__(self, shapes: Shapes, governor: Governor | None) -> None:
        self._shapes, self._governor = shapes, governor
        self._choice = 0  # of the round that is being played
        self._classes: list[RowClass] = []  # of its rows
        self._ranks = Ranks(max(shapes.longest, 1), BRANCHES)

    @property
    def looks_up(self) -> bool:
        """Whether it makes a difference which rows have n-gram matches."""
        return self._governor is not None and bool(self._shapes.lookups)

    def plan(self, rows: Sequence[Row], proposing: bool = True, matches: Sequence[Match] = ()) -> Plan:
        """A row's depth is one less than what it may still produce, since the target adds a token of its own.

        matches: each row's, where they were looked up.
        """
        self._classes = [class_of(row) for row in rows]
        if matches:
            self._classes = [replace(one, match=match) for one, match in zip(self._classes, matches, strict=True)]
        asked = [row.generation.draft_length if proposing else 0 for row in rows]
        self._choice = self._chosen(asked)
        lookup, shape = self._shapes.lookup(self._choice), self._shape()
        depths = [
            self._depths(row, wish, one.match, shape, lookup)
            for row, wish, one in zip(rows, asked, self._classes, strict=True)
        ]
        own, matched = ([both[i] for both in depths] for i in range(2))
        return Plan(shape, own, NOTHING if lookup is None else lookup.shape, matched)

    def _depths(self, row: Row, wish: int | None, match: Match, shape: Shape, lookup: Lookup | None) -> tuple[int, int]:
        """How deep a row's drafter is to go, and its match. What is drawn can stand in no tree with what is chosen."""
        most = row.remaining - 1 if wish is None else min(row.remaining - 1, wish)
        own = min(shape.depth if wish is None else self._shapes.longest, most)
        if lookup is None or not lookup.takes(match):
            return own, 0
        return own if lookup.joined and not row.sampler.sampled else 0, min(lookup.shape.depth, most)

    def _shape(self) -> Shape:
        """Of what drafters propose in the round that was chosen."""
        if lookup := self._shapes.lookup(self._choice):
            return lookup.own
        shape = self._shapes.shape(self._choice)
        if not shape.form:
            return shape
        return self._shapes.fitted(shape, self._ranks, Counter(one.workload for one in self._classes))

    def _chosen(self, asked: Sequence[int | None]) -> int:
        if None not in asked:
            return 0  # rows that say what they want get chains
        if self._governor is None:
            return self._shapes.largest
        return self._governor.choose(self._classes)

    def learn(self, rows: Sequence[Row], plan: Plan, result: RoundResult, total_ms: float) -> None:
        """Learn from a round that was played, and tell the governor of it."""
        if self._shapes.trees:
            for row, outcome, matched in zip(rows, result.outcomes, plan.matched, strict=True):
                if outcome.ranks and row.generation.lossless and not matched:
                    self._ranks.see(row.generation.workload, outcome.ranks)
        if self._governor is None:
            return
        width = min(result.width, self._shapes.longest)
        if result.width and self._choice > self._shapes.longest:
            width = self._choice
        self._governor.observe(
            Played(
                batch=len(rows),
                width=width,
                draft_ms=result.draft_ms,
                verify_ms=result.verify_ms,
                other_ms=total_ms - result.draft_ms - result.verify_ms,
                absorbed=result.absorbed,
                sampled=any(row.sampler.sampled for row in rows),
                rows=tuple(
                    (row_class, self._proposed(plan, i, result, width), result.outcomes[i].accepted)
                    for i, row_class in enumerate(self._classes)
                ),
                by_match=tuple(
                    (self._classes[i], plan.matched[i], accepted) for i, accepted in result.by_match.items()
                ),
            )
        )

    def _proposed(self, plan: Plan, place: int, result: RoundResult, width: int) -> int:
        """How deep a row's proposal went, as far as it is judged by it: a tree or a match that ends early is a miss."""
        proposed = result.outcomes[place].proposed
        if plan.shape.is_chain and proposed and not plan.matched[place]:
            return proposed
        return result.asked[place] if width else 0


def class_of(row: Row) -> RowClass:
    generation = row.generation
    bucket = generation.policy.bucket
    return RowClass(generation.workload, bucket if generation.lossless else bucket + LOSSY, generation.lossless)
