"""Speculation in the engine: who proposes for each row of a round, how much, and what is learned of it.

No text depends on a drafter. Where one fails, the round is not played, and the engine goes on without it; where a new
version is below the floor, the engine goes back from it before the next round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import structlog

from adapter.target import Target
from service.engine.floor import Broken, Proposed
from service.engine.generation import Generation, Row
from service.engine.governor import Governor
from service.engine.lookups import Match
from service.engine.ngrams import Fallback, Ngrams
from service.engine.pace import Pace, class_of
from service.engine.residents import DrafterFailed, Resident, Residents
from service.engine.rounds import Plan, RoundResult, play
from service.engine.shapes import Shapes
from service.engine.slots import Slots

log = structlog.get_logger()


@dataclass(frozen=True)
class Turn:
    """A round that was played, for rows to which nothing of it is committed yet."""

    began: float  # perf_counter, seconds
    rows: list[Row]
    plan: Plan
    result: RoundResult


class Speculation:
    """Plays rounds with whatever drafters there are."""

    def __init__(
        self,
        target: Target,
        slots: Slots,
        residents: Residents,
        shapes: Shapes,
        governor: Governor | None,
        ngrams: Ngrams | None,
        fallback: Fallback,
    ) -> None:
        self._target, self._slots, self._residents, self._governor = target, slots, residents, governor
        self._ngrams, self._fallback = ngrams, fallback
        self._pace = Pace(shapes, governor)

    def play(self, rows: list[Row]) -> Turn | None:
        """One round; None where a drafter failed, which takes no further part."""
        began, served = perf_counter(), [self._drafter_of(row.generation) for row in rows]
        proposing = any(resident.drafter is not None for resident in served)
        plan = self._pace.plan(rows, proposing, self._matches(rows) if proposing else ())
        try:
            return Turn(began, rows, plan, play(self._target, self._slots, served, rows, plan, self._lookups))
        except DrafterFailed as failed:
            self.without([failed.resident])
        except Exception:
            asked = {r for r, depth in zip(served, plan.depths, strict=True) if depth and r.drafter is not None}
            if not asked:
                raise
            self.without(list(asked))
        return None

    def learn(self, turn: Turn) -> None:
        """Learn from a round, now that it is committed, and go back where a new version is below the floor."""
        self._pace.learn(turn.rows, turn.plan, turn.result, (perf_counter() - turn.began) * 1e3)
        self._gone_back(self._residents.note(self._judged(turn)))

    def without(self, residents: Sequence[Resident]) -> None:
        """Go on without these, of which one raised the error that is being handled."""
        log.exception("drafter.failed", drafters=sorted((r.lane, r.version) for r in residents))
        if self._lookups in residents:
            self.stop()
            self._ngrams = None
        self._gone_back(self._residents.failed(residents))

    def swapped(self) -> None:
        """Another drafter is live."""
        if self._governor is not None:
            self._governor.rearm()

    def finished(self, generation: Generation) -> None:
        """An output that n-grams may be looked for in."""
        if self._ngrams is not None:
            self._ngrams.finished(generation)

    def stop(self) -> None:
        if self._ngrams is not None:
            self._ngrams.stop()

    @property
    def _lookups(self) -> Resident | None:
        """Who proposes where n-grams do."""
        return None if self._ngrams is None else self._ngrams.resident

    def _matches(self, rows: Sequence[Row]) -> list[Match]:
        """Each row's n-gram match, where the governor goes by them."""
        if self._ngrams is None or not self._pace.looks_up:
            return []
        try:
            return [self._ngrams.match(row) for row in rows]
        except DrafterFailed as failed:
            self.without([failed.resident])
            return []

    def _drafter_of(self, generation: Generation) -> Resident:
        """The version that serves a request; n-grams where there is none and they stand in for it."""
        resident = self._residents.of(generation)
        if resident.drafter is None and self._fallback == "ngram" and self._lookups is not None:
            return self._lookups
        return resident

    def _judged(self, turn: Turn) -> list[tuple[Resident, Proposed]]:
        """What drafters proposed, by row; what is accepted leniently says nothing of a drafter."""
        lookups, found = self._lookups, []
        for row, resident, outcome in zip(turn.rows, turn.result.proposers, turn.result.outcomes, strict=True):
            generation = row.generation
            if outcome.proposed and generation.lossless and resident is not lookups:
                played = Proposed(
                    generation.request_id, class_of(row), resident.version, outcome.proposed, outcome.accepted
                )
                found.append((resident, played))
        return found

    def _gone_back(self, lanes: Sequence[tuple[str, Broken]]) -> None:
        for lane, broken in lanes:
            log.warning("drafter.taken_back", lane=lane, version=broken.version, reason=broken.reason)
        if lanes:
            self.swapped()
