"""What to propose in the next round: what each row's request asks for, or the governor's choice."""

from collections import Counter
from collections.abc import Sequence

from adapter.drafters.protocol import Shape
from service.engine.generation import Row
from service.engine.governor import Governor, Played, RowClass
from service.engine.ranks import Ranks
from service.engine.rounds import Plan, RoundResult
from service.engine.shapes import BRANCHES, Shapes
from storage.records import LOSSY


class Pace:
    """Chooses among `shapes`; the largest where there is no governor."""

    def __init__(self, shapes: Shapes, governor: Governor | None) -> None:
        self._shapes, self._governor = shapes, governor
        self._choice = 0  # of the round that is being played
        self._ranks = Ranks(max(shapes.longest, 1), BRANCHES)

    def plan(self, rows: Sequence[Row], proposing: bool = True) -> Plan:
        """A row's depth is one less than what it may still produce, since the target adds a token of its own."""
        asked = [row.generation.draft_length if proposing else 0 for row in rows]
        self._choice = self._chosen(rows, asked)
        shape = self._shapes.shape(self._choice)
        if shape.form:
            shape = self._shapes.fitted(shape, self._ranks, Counter(row.generation.workload for row in rows))
        deepest = self._shapes.longest if shape.is_chain else shape.depth
        wanted = [shape.depth if own is None else own for own in asked]
        lengths = [min(depth, deepest, row.remaining - 1) for depth, row in zip(wanted, rows, strict=True)]
        shape = Shape.chain(max(lengths)) if shape.is_chain else shape
        return Plan(shape, lengths, self._shapes.looks_up(self._choice))

    def _chosen(self, rows: Sequence[Row], asked: Sequence[int | None]) -> int:
        if None not in asked:
            return 0  # rows that say what they want get chains
        if self._governor is None:
            return self._shapes.largest
        return self._governor.choose([class_of(row) for row in rows])

    def learn(self, rows: Sequence[Row], plan: Plan, result: RoundResult, total_ms: float) -> None:
        """Learn from a round that was played, and tell the governor of it."""
        if self._shapes.trees:
            for row, outcome in zip(rows, result.outcomes, strict=True):
                if outcome.ranks and row.generation.lossless:
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
                    (class_of(row), self._proposed(plan, depth, outcome.proposed, width), outcome.accepted)
                    for row, depth, outcome in zip(rows, result.asked, result.outcomes, strict=True)
                ),
            )
        )

    def _proposed(self, plan: Plan, asked: int, proposed: int, width: int) -> int:
        """How deep a row's proposal went, as far as it is judged by it: a tree or a match that ends early is a miss."""
        if plan.shape.is_chain and proposed:
            return proposed
        return min(asked, plan.shape.depth) if width else 0


def class_of(row: Row) -> RowClass:
    generation = row.generation
    bucket = generation.policy.bucket
    return RowClass(generation.workload, bucket if generation.lossless else bucket + LOSSY, generation.lossless)
