"""What the registry hands out: frozen records of drafters, versions, pointers and events, made from rows.

A version's state is derived here, never stored: the pointer says what is live, the events what was taken
back, the evaluations what the gate answered.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from storage.decisions import Evaluation
from storage.lineage import evaluation_report
from storage.tables import DrafterRow, EvaluationRow, EventRow, IntervalRow, MarkRow, PointerRow, VersionRow


@dataclass(frozen=True)
class Drafter:
    id: int
    name: str
    kind: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    config: dict[str, Any]
    created_at: datetime
    retired_at: datetime | None


@dataclass(frozen=True)
class Version:
    id: int
    drafter: str  # name
    number: int
    parent: int | None  # number; None of a version 1, a copy of another drafter's version too
    weights_sha256: str
    size_bytes: int
    created_at: datetime
    window_id: int | None


@dataclass(frozen=True)
class VersionSummary:
    """A version with what became of it; the evaluation is None where there was none (yet)."""

    version: Version
    state: str  # live, canary, candidate, refused, rolled_back, retired, withdrawn, quarantined
    reason: str  # of its withdrawal or the rollback that took it out, else of the gate or the move that took it in
    evaluation: Evaluation | None
    weights_deleted: bool = False  # past its retention: only the rows are left
    pinned: bool = False  # its weights are kept whatever their age


@dataclass(frozen=True)
class Pointer:
    drafter: str
    live: Version
    previous: Version | None
    generation: int
    kind: str  # of the event that led here
    holdback: float  # share of the requests that stays on `previous`; 0.0 where no watch is open
    canary: Version | None = None
    canary_share: float = 0.0  # of the requests, that the canary serves


@dataclass(frozen=True)
class Event:
    kind: str  # init, promote, rollback; canary (from live to it), recall (from it to live)
    before: int | None  # version numbers
    after: int
    generation: int
    actor: str
    reason: str
    at: datetime


@dataclass(frozen=True)
class Interval:
    """A version was live from `started_at` up to, but not at, `ended_at` (None: still is)."""

    version: int
    generation: int
    started_at: datetime
    ended_at: datetime | None


def drafter_view(row: DrafterRow) -> Drafter:
    return Drafter(
        row.id, row.name, row.kind, row.target_fingerprint, row.tokenizer_fingerprint, row.config,
        row.created_at, row.retired_at,
    )  # fmt: skip


def version_view(row: VersionRow) -> Version:
    return Version(
        id=row.id,
        drafter=row.drafter.name,
        number=row.number,
        parent=row.parent.number if row.parent and row.parent.drafter_id == row.drafter_id else None,
        weights_sha256=row.weights_sha256,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        window_id=row.window_id,
    )


def event_view(row: EventRow, numbers: dict[int, int]) -> Event:
    """`numbers` maps version ids to version numbers."""
    before = numbers[row.from_id] if row.from_id is not None else None
    return Event(row.kind, before, numbers[row.to_id], row.generation, row.actor, row.reason, row.at)


def interval_view(row: IntervalRow, numbers: dict[int, int]) -> Interval:
    return Interval(numbers[row.version_id], row.generation, row.started_at, row.ended_at)


def summary_view(
    row: VersionRow,
    pointer: PointerRow,
    last_event: EventRow | None,
    evaluation: EvaluationRow | None,
    marks: dict[str, MarkRow],
    quarantined: str,
) -> VersionSummary:
    """`last_event` is the newest event that this version took part in, on either side; `marks` are by kind.

    `quarantined` is the reason of its quarantine, empty where it is in none.
    """
    state = _state(row.id, pointer, last_event, evaluation)
    reason = quarantined or _reason(row.id, last_event, evaluation)
    if quarantined and state not in ("live", "canary"):
        state = "quarantined"
    withdrawn = marks.get("withdrawn")
    return VersionSummary(
        version=version_view(row),
        state="withdrawn" if withdrawn and state not in ("live", "canary") else state,
        reason=withdrawn.reason if withdrawn else reason,
        evaluation=evaluation_report(evaluation) if evaluation else None,
        weights_deleted="weights_deleted" in marks,
        pinned="pinned" in marks,
    )


def _state(version_id: int, pointer: PointerRow, last_event: EventRow | None, evaluation: EvaluationRow | None) -> str:
    if version_id == pointer.live_id:
        return "live"
    if version_id == pointer.canary_id:
        return "canary"
    if last_event is not None:
        return "rolled_back" if last_event.kind in ("rollback", "recall") else "retired"
    return "refused" if evaluation is not None and not evaluation.promote else "candidate"


def _reason(version_id: int, last_event: EventRow | None, evaluation: EvaluationRow | None) -> str:
    backwards = last_event is not None and last_event.kind in ("rollback", "recall")
    taken_back = backwards and last_event is not None and last_event.from_id == version_id
    if evaluation is not None and not taken_back:
        return evaluation.reason
    return last_event.reason if last_event is not None else ""
