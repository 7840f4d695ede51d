"""Deleting a tenant's records, wherever they are: windows, stream, quarantine, and the marks of folded ones.

begin (a row, from which moment on no window takes the tenant's older records) -> windows written again without
them -> the old files deleted -> stream and quarantine -> done, with the audit row and, if asked for, the versions
that learnt from them withdrawn. Each step can be repeated, and the row stays "started" until all are done: the
command, run again, or the housekeeper finishes what a crash left. What is counted per version and minute
(`acceptance_window`) names no tenant and stays.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from storage import audit, lookup, marks, pointer, rewritten
from storage.database import now, reading, transaction
from storage.exposure import Exposed, exposed
from storage.records import summary
from storage.stream import FeedbackStream
from storage.tables import PointerRow, PurgeRow, VersionRow, WindowPurgeRow, WindowRecordRow
from storage.weights import WeightsStore

log = structlog.get_logger()


@dataclass(frozen=True)
class Purge:
    id: int
    tenant: str
    actor: str
    withdraw: bool  # the versions that learnt from the records are withdrawn too
    state: str  # started, done
    counts: dict[str, Any]
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Found:
    """What a purge would meet in the database."""

    windows: int
    training: int  # records
    holdout: int
    versions: tuple[Exposed, ...]


def found(engine: Engine, tenant: str) -> Found:
    """What there is of a tenant in windows, and who learnt from it. Streams are not looked into."""
    counted = select(WindowRecordRow.part, func.count()).where(WindowRecordRow.tenant == tenant)
    with reading(engine) as session:
        parts = dict(session.execute(counted.group_by(WindowRecordRow.part)).tuples().all())
        windows = len(rewritten.windows_with(session, tenant))
        return Found(windows, parts.get("training", 0), parts.get("holdout", 0), tuple(exposed(session, tenant)))


def begin(engine: Engine, tenant: str, withdraw: bool, actor: str) -> Purge:
    """From now on no window takes records of the tenant that finished before. One that a crash left goes on."""
    with transaction(engine) as session:
        rewritten.lock_drafters(session)  # a window that is being kept is either seen by us, or sees this row
        open_one = select(PurgeRow).where(PurgeRow.tenant == tenant, PurgeRow.state == "started")
        row = session.scalar(open_one.limit(1))
        if row is None:
            row = PurgeRow(tenant=tenant, actor=actor, withdraw=withdraw, state="started", counts={})
        row.started_at, row.withdraw = now(session), row.withdraw or withdraw
        session.add(row)
        session.flush()
        return _purge(row)


def unfinished(engine: Engine) -> list[Purge]:
    """Purges that were begun and did not end, oldest first."""
    with reading(engine) as session:
        rows = session.scalars(select(PurgeRow).where(PurgeRow.state == "started").order_by(PurgeRow.id))
        return [_purge(row) for row in rows]


def finish(engine: Engine, blobs: WeightsStore, streams: Sequence[FeedbackStream], purge: Purge) -> Purge:
    """Do what is left of a purge; with Redis away it raises `redis.RedisError`, and the purge stays begun."""
    rewritten.without_tenant(engine, blobs, purge.id, purge.tenant)
    unwanted = _Unwanted(purge.tenant)
    found = [stream.find(unwanted) for stream in streams]
    _note_found(engine, purge, unwanted)
    for stream, entries in zip(streams, found, strict=True):
        stream.delete(entries)
    done = _end(engine, purge)
    log.info("purge.done", tenant=done.tenant, **done.counts)
    return done


def sweep_late(engine: Engine, streams: Sequence[FeedbackStream], within: timedelta) -> int:
    """Delete records that came onto a stream after the purge of their tenant, from before it; how many."""
    with reading(engine) as session:
        recent = select(PurgeRow).where(PurgeRow.state == "done", PurgeRow.started_at > now(session) - within)
        purges = [_purge(row) for row in session.scalars(recent)]
    swept = 0
    for purge in purges:
        late = _Unwanted(purge.tenant, before=purge.started_at.timestamp())
        found = [stream.find(late) for stream in streams]
        with transaction(engine) as session:
            rewritten.forget_folded(session, late.ids)
        swept += sum(stream.delete(entries) for stream, entries in zip(streams, found, strict=True))
    return swept


def untouched(engine: Engine, drafter: str, versions: Iterable[Exposed]) -> int | None:
    """The number of the version to go back to from those that learnt from a tenant's records."""
    with reading(engine) as session:
        points = session.get_one(PointerRow, lookup.drafter_row(session, drafter).id)
        row = _untouched(session, points, {v.id for v in versions})
        return row.number if row else None


class _Unwanted:
    """Whether an entry is the tenant's, and finished before a moment. Keeps their ids.

    Without such a moment, an entry that nobody can read counts too, as it could be anybody's.
    """

    def __init__(self, tenant: str, before: float | None = None) -> None:
        self.tenant, self.before = tenant, before
        self.ids: list[str] = []
        self.unreadable = 0

    def __call__(self, data: bytes) -> bool:
        record = summary(data)
        if record is None:
            self.unreadable += 1
            return self.before is None
        ours = record.tenant == self.tenant and (self.before is None or record.finished_at <= self.before)
        if ours:
            self.ids.append(record.record_id)
        return ours


def _note_found(engine: Engine, purge: Purge, found: _Unwanted) -> None:
    """Before the entries are deleted: afterwards nobody knows their ids. After a crash fewer are found again."""
    with transaction(engine) as session:
        rewritten.forget_folded(session, found.ids)
        row = session.get_one(PurgeRow, purge.id, with_for_update=True)
        if row.state == "done":
            return
        counted = {"stream": len(found.ids), "unreadable": found.unreadable}
        row.counts = {name: max(count, row.counts.get(name, 0)) for name, count in counted.items()}


def _end(engine: Engine, purge: Purge) -> Purge:
    """All in one: the versions withdrawn, the audit row written, and the purge done."""
    with transaction(engine) as session:
        rewritten.lock_drafters(session)
        row = session.get_one(PurgeRow, purge.id, with_for_update=True)
        if row.state == "done":
            return _purge(row)
        versions = exposed(session, row.tenant)
        moves = list(_withdraw(session, row, versions)) if row.withdraw else []
        row.counts = _counts(session, row, versions, moves)
        row.state, row.finished_at = "done", now(session)
        reason = f"deletion of the records of tenant {row.tenant}"
        audit.append(session, row.actor, "tenant.purge", f"tenant/{row.tenant}", {}, row.counts, reason)
        return _purge(row)


def _counts(session: Session, row: PurgeRow, versions: list[Exposed], moves: list[str]) -> dict[str, Any]:
    """What was deleted where, in figures; no content."""
    windows = session.scalars(select(WindowPurgeRow).where(WindowPurgeRow.purge_id == row.id)).all()
    return {
        **row.counts,
        "windows": len(windows),
        "training": sum(w.training for w in windows),
        "holdout": sum(w.holdout for w in windows),
        "versions": [f"{v.drafter}/{v.number}" for v in versions],
        "withdrawn": row.withdraw,
        "rolled_back": moves,
    }


def _withdraw(session: Session, purge: PurgeRow, versions: Iterable[Exposed]) -> Iterator[str]:
    """Mark the versions, so that none is made live again, and take back those that are; says which moves it made."""
    ids = {v.id for v in versions}
    for version in versions:
        reason = f"it learnt from records of tenant {purge.tenant}, which were purged: {version.how}"
        marks.put(session, version.id, marks.WITHDRAWN, purge.actor, reason)
    for version in versions:
        row = session.get_one(VersionRow, version.id)
        points = pointer.lock(session, row.drafter_id)
        if points.canary_id == version.id:
            pointer.recall(session, points, "overtaken", purge.actor, "it learnt from records that were purged")
        if points.live_id != version.id:
            continue
        to = _untouched(session, points, ids)
        if to is None:
            yield f"{version.drafter}: none, no version is left that did not learn from the records"
            continue
        reason = f"version {version.number} learnt from records of tenant {purge.tenant}, which were purged"
        pointer.roll_back(session, to, row, purge.actor, reason)
        yield f"{version.drafter}: {version.number} -> {to.number}"


def _untouched(session: Session, points: PointerRow, ids: set[int]) -> VersionRow | None:
    """The version to go back to: one that was live, or version 1, which learnt from no traffic and is always kept."""
    first = select(VersionRow).where(VersionRow.drafter_id == points.drafter_id, VersionRow.number == 1)
    return marks.fallback(session, points, without=ids) or session.scalar(first.where(VersionRow.id.not_in(ids)))


def _purge(row: PurgeRow) -> Purge:
    return Purge(row.id, row.tenant, row.actor, row.withdraw, row.state, row.counts, row.started_at, row.finished_at)
