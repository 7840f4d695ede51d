"""Drift in SQL: where each workload's detector stands, the alarms, and which window each alarm started.

The housekeeper revises the series of a drafter under its row's lock, so that two housekeepers take turns. Labels are
chosen by clients: series are bounded in number, the least recently seen leaves first, and so are alarms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, delete, func, select, update
from sqlalchemy.orm import Session

from storage import lookup
from storage.database import now, reading, transaction
from storage.tables import DriftAlarmRow, DriftSeriesRow

SERIES = 256  # a drafter
ALARMS = 1000  # a drafter and kind
FALL, NOVEL = "fall", "novel"

Key = tuple[str, str]  # workload, policy


@dataclass(frozen=True)
class Series:
    """A detector at rest: its numbers are `adapter/drift`'s."""

    version: int  # number, whose acceptance this is
    requests: int  # of this version
    state: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What a detector noticed."""

    kind: str  # fall, novel
    workload: str
    policy: str
    version: int
    before: float | None  # acceptance probability; None of a novel workload
    after: float | None
    requests: int  # since the fall began
    reason: str  # in one sentence


@dataclass(frozen=True)
class Alarm:
    """A finding as it was kept."""

    id: int
    at: datetime
    finding: Finding
    window_id: int | None  # the window that it started; None: it awaits one


@dataclass(frozen=True)
class Revision:
    """What some requests changed."""

    series: Mapping[Key, Series]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class SeriesView:
    """A series, for reading."""

    workload: str
    policy: str
    version: int
    requests: int
    last_seen: datetime
    state: dict[str, Any]


class DriftStore:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def revise(self, drafter: str, revise: Callable[[Mapping[Key, Series]], Revision]) -> list[Alarm]:
        """Replace the series that `revise` changes, given all there are; the alarms that it adds."""
        with transaction(self.engine) as session:
            owner = lookup.drafter_row(session, drafter, lock=True).id
            rows = {(row.workload, row.policy): row for row in session.scalars(_series_of(owner))}
            revision = revise({key: Series(r.version, r.requests, r.state) for key, r in rows.items()})
            for key, series in revision.series.items():
                _keep(session, owner, key, series, rows.get(key))
            _forget_series(session, owner)
            return _add_alarms(session, owner, revision.findings)

    def series(self, drafter: str) -> list[SeriesView]:
        """The most recently seen first."""
        with reading(self.engine) as session:
            found = _series_of(lookup.drafter_row(session, drafter).id).order_by(DriftSeriesRow.last_seen.desc())
            return [
                SeriesView(row.workload, row.policy, row.version, row.requests, row.last_seen, row.state)
                for row in session.scalars(found)
            ]

    def alarms(self, drafter: str, limit: int = 50, window_id: int | None = None) -> list[Alarm]:
        """The newest first; with `window_id`, those that started this window."""
        with reading(self.engine) as session:
            found = select(DriftAlarmRow).where(DriftAlarmRow.drafter_id == lookup.drafter_row(session, drafter).id)
            if window_id is not None:
                found = found.where(DriftAlarmRow.window_id == window_id)
            return [_alarm(row) for row in session.scalars(found.order_by(DriftAlarmRow.id.desc()).limit(limit))]

    def counts(self, drafter: str) -> dict[str, int]:
        """How many alarms of each kind are kept."""
        with reading(self.engine) as session:
            owner = lookup.drafter_row(session, drafter).id
            found = select(DriftAlarmRow.kind, func.count()).where(DriftAlarmRow.drafter_id == owner)
            counted = dict(session.execute(found.group_by(DriftAlarmRow.kind)).tuples().all())
            return {kind: counted.get(kind, 0) for kind in (FALL, NOVEL)}

    def pending(self, drafter: str) -> bool:
        """Whether a fall awaits its update."""
        with reading(self.engine) as session:
            owner = lookup.drafter_row(session, drafter).id
            return session.scalar(select(DriftAlarmRow.id).where(_pending(owner)).limit(1)) is not None


def answer(session: Session, drafter_id: int, window_id: int) -> None:
    """The pending falls are this window's: it was, or will be, trained on what came after them."""
    session.execute(update(DriftAlarmRow).where(_pending(drafter_id)).values(window_id=window_id))


def _pending(drafter_id: int) -> ColumnElement[bool]:
    return (DriftAlarmRow.drafter_id == drafter_id) & (DriftAlarmRow.kind == FALL) & DriftAlarmRow.window_id.is_(None)


def _series_of(drafter_id: int) -> Any:
    return select(DriftSeriesRow).where(DriftSeriesRow.drafter_id == drafter_id)


def _keep(session: Session, drafter_id: int, key: Key, series: Series, row: DriftSeriesRow | None) -> None:
    moment = now(session)
    if row is None:
        row = DriftSeriesRow(drafter_id=drafter_id, workload=key[0], policy=key[1])
        session.add(row)
    row.version, row.requests, row.state, row.last_seen = series.version, series.requests, series.state, moment


def _forget_series(session: Session, drafter_id: int) -> None:
    """Those beyond the bound, least recently seen first."""
    session.flush()
    beyond = _series_of(drafter_id).order_by(DriftSeriesRow.last_seen.desc(), DriftSeriesRow.workload).offset(SERIES)
    for row in session.scalars(beyond):
        session.delete(row)


def _add_alarms(session: Session, drafter_id: int, findings: tuple[Finding, ...]) -> list[Alarm]:
    rows = [
        DriftAlarmRow(
            drafter_id=drafter_id, kind=f.kind, workload=f.workload, policy=f.policy, version=f.version,
            before=f.before, after=f.after, requests=f.requests, reason=f.reason, at=now(session),
        )
        for f in findings
    ]  # fmt: skip
    session.add_all(rows)
    session.flush()
    for kind in {f.kind for f in findings}:
        same = (DriftAlarmRow.drafter_id == drafter_id) & (DriftAlarmRow.kind == kind)
        newest = select(DriftAlarmRow.id).where(same).order_by(DriftAlarmRow.id.desc())
        last = session.scalar(newest.offset(ALARMS - 1).limit(1))
        if last is not None:
            session.execute(delete(DriftAlarmRow).where(same, DriftAlarmRow.id < last))
    return [_alarm(row) for row in rows]


def _alarm(row: DriftAlarmRow) -> Alarm:
    finding = Finding(
        row.kind, row.workload, row.policy, row.version, row.before, row.after, row.requests, row.reason
    )  # fmt: skip
    return Alarm(row.id, row.at, finding, row.window_id)
