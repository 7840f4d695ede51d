"""How many tokens to propose for each row of the next round: what its request asks for, or the governor's choice."""

from collections.abc import Sequence

from service.engine.generation import Row
from service.engine.governor import Governor, Played, RowClass
from service.engine.rounds import RoundResult


class Pace:
    """Draft lengths of up to `most`, the longest where there is no governor."""

    def __init__(self, most: int, governor: Governor | None) -> None:
        self._most, self._governor = most, governor

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """A row's draft length; one less than what it may still produce, since the target adds a token of its own."""
        asked = [row.generation.draft_length for row in rows]
        chosen = self._most
        if self._governor is not None and None in asked:
            chosen = self._governor.choose([class_of(row) for row in rows])
        wanted = [chosen if own is None else own for own in asked]
        return [min(length, self._most, row.remaining - 1) for length, row in zip(wanted, rows, strict=True)]

    def learn(self, rows: Sequence[Row], result: RoundResult, total_ms: float) -> None:
        """Tell the governor of a round that was played."""
        if self._governor is None:
            return
        self._governor.observe(
            Played(
                batch=len(rows),
                width=result.width,
                draft_ms=result.draft_ms,
                verify_ms=result.verify_ms,
                other_ms=total_ms - result.draft_ms - result.verify_ms,
                absorbed=result.absorbed,
                sampled=any(row.sampler.sampled for row in rows),
                rows=tuple(
                    (class_of(row), outcome.proposed, outcome.accepted)
                    for row, outcome in zip(rows, result.outcomes, strict=True)
                ),
            )
        )


def class_of(row: Row) -> RowClass:
    return RowClass(row.generation.workload, row.generation.policy.bucket)
