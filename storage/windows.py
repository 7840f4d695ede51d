"""Windows of feedback: what one update learns from, kept before the stream is acknowledged.

The records lie in the weights store as one file; the row says where, and the record rows that each record is
used once, however often it arrives. A window is open until its update is decided.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.orm import Session

from storage import drift, lookup
from storage.database import now, reading
from storage.jobs import Lease, writing
from storage.records import FeedbackRecord
from storage.tables import DrafterRow, PurgeRow, WindowRecordRow, WindowRow
from storage.weights import WeightsStore

_decoder = msgspec.msgpack.Decoder(tuple[tuple[FeedbackRecord, ...], tuple[FeedbackRecord, ...]])
BATCH = 500  # ids a query; SQLite bounds the number of its parameters


@dataclass(frozen=True)
class Window:
    id: int
    drafter: str  # name
    sha256: str
    training: int  # records
    holdout: int  # records
    state: str  # open, closed
    outcome: str  # of a closed one, in a word
    created_at: datetime
    deleted: bool = False  # its file was deleted for its age
    cause: str = ""  # why its update started: size, age, drift
    left_out: Mapping[str, int] = field(default_factory=dict)  # records by the guard that kept them out


@dataclass(frozen=True)
class WindowRecords:
    training: tuple[FeedbackRecord, ...]
    holdout: tuple[FeedbackRecord, ...]


class WindowOpen(RuntimeError):
    """The drafter has a window that is not decided yet; that one comes first."""


class Windows:
    def __init__(self, engine: Engine, blobs: WeightsStore) -> None:
        self.engine = engine
        self.blobs = blobs

    def open(self, drafter: str) -> Window | None:
        """The window that was kept and not decided yet, as after a crash."""
        with reading(self.engine) as session:
            row = _open_row(session, lookup.drafter_row(session, drafter).id)
            return _window(row, drafter) if row else None

    def keep(
        self,
        drafter: str,
        training: tuple[FeedbackRecord, ...],
        holdout: tuple[FeedbackRecord, ...],
        lease: Lease | None = None,
        cause: str = "",
        left_out: Mapping[str, int] | None = None,
    ) -> Window | None:
        """Store the records that no window has yet; None where there are none. Raises `WindowOpen`.

        What a purge of its tenant should have deleted, but came in later, is dropped here. `cause` says why the
        update started, `left_out` how many records each guard kept out; drift alarms that waited become its own.
        """
        with writing(self.engine, lease) as session:
            owner = lookup.drafter_row(session, drafter, lock=True)
            if (waiting := _open_row(session, owner.id)) is not None:
                raise WindowOpen(f"window {waiting.id} of {drafter} is open: decide it first")
            training, holdout = (_unpurged(session, records) for records in (training, holdout))
            seen = _known(session, [r.record_id for r in (*training, *holdout)])
            fresh = WindowRecords(_unseen(training, seen), _unseen(holdout, seen))
            if not fresh.training and not fresh.holdout:
                return None
            row = self._store(session, owner, fresh, cause, left_out or {})
            drift.answer(session, owner.id, row.id)
            return _window(row, drafter)

    def known(self, record_ids: Iterable[str]) -> set[str]:
        """Those of the ids that some window has."""
        with reading(self.engine) as session:
            return _known(session, list(record_ids))

    def close(self, window: Window, outcome: str, lease: Lease | None = None) -> None:
        """The window is decided: "promoted", "refused", "failed". Closing it again changes nothing."""
        with writing(self.engine, lease) as session:
            row = session.get_one(WindowRow, window.id)
            if row.state == "open":
                row.state, row.outcome, row.closed_at = "closed", outcome, now(session)

    def recent(self, drafter: str, limit: int) -> list[Window]:
        """The newest windows first, open or closed; those whose file was deleted are gone from here."""
        with reading(self.engine) as session:
            owner = lookup.drafter_row(session, drafter).id
            found = select(WindowRow).where(WindowRow.drafter_id == owner, WindowRow.deleted_at.is_(None))
            return [_window(row, drafter) for row in session.scalars(found.order_by(WindowRow.id.desc()).limit(limit))]

    def window(self, window_id: int) -> Window:
        """The window of this id, which some row named."""
        with reading(self.engine) as session:
            row = session.get_one(WindowRow, window_id)
            return _window(row, session.get_one(DrafterRow, row.drafter_id).name)

    def records(self, window: Window) -> WindowRecords:
        """The window's records, from the store; raises `BlobDamaged`."""
        return unpacked(self.blobs.get(window.sha256))

    def _store(
        self, session: Session, owner: DrafterRow, fresh: WindowRecords, cause: str, left_out: Mapping[str, int]
    ) -> WindowRow:
        """The file first, then the rows: a crash between them leaves an orphan file and nothing else."""
        blob = self.blobs.put(packed(fresh))
        row = WindowRow(
            drafter_id=owner.id, sha256=blob.sha256, training=len(fresh.training), holdout=len(fresh.holdout),
            state="open", outcome="", created_at=now(session), cause=cause, left_out=dict(left_out),
        )  # fmt: skip
        session.add(row)
        session.flush()
        parts = (("training", fresh.training), ("holdout", fresh.holdout))
        rows = [
            {
                "record_id": r.record_id,
                "window_id": row.id,
                "part": part,
                "tenant": r.tenant,
                "workload": r.workload,
            }
            for part, records in parts
            for r in records
        ]
        session.execute(insert(WindowRecordRow), rows)
        return row


def packed(records: WindowRecords) -> bytes:
    """A window's file."""
    return msgspec.msgpack.encode((records.training, records.holdout))


def unpacked(data: bytes) -> WindowRecords:
    return WindowRecords(*_decoder.decode(data))


def _unpurged(session: Session, records: tuple[FeedbackRecord, ...]) -> tuple[FeedbackRecord, ...]:
    """Without those that finished before their tenant was purged."""
    last = select(PurgeRow.tenant, func.max(PurgeRow.started_at)).group_by(PurgeRow.tenant)
    purged = {tenant: at.timestamp() for tenant, at in session.execute(last).tuples()}
    return tuple(r for r in records if r.finished_at > purged.get(r.tenant, float("-inf")))


def _open_row(session: Session, drafter_id: int) -> WindowRow | None:
    return session.scalar(select(WindowRow).where(WindowRow.drafter_id == drafter_id, WindowRow.state == "open"))


def _known(session: Session, record_ids: list[str]) -> set[str]:
    known: set[str] = set()
    for start in range(0, len(record_ids), BATCH):
        some = record_ids[start : start + BATCH]
        found = select(WindowRecordRow.record_id).where(WindowRecordRow.record_id.in_(some))
        known.update(session.scalars(found))
    return known


def _unseen(records: tuple[FeedbackRecord, ...], seen: set[str]) -> tuple[FeedbackRecord, ...]:
    """Each record once; adds what it lets through to `seen`."""
    fresh = []
    for record in records:
        if record.record_id not in seen:
            seen.add(record.record_id)
            fresh.append(record)
    return tuple(fresh)


def _window(row: WindowRow, drafter: str) -> Window:
    return Window(
        row.id, drafter, row.sha256, row.training, row.holdout, row.state, row.outcome, row.created_at,
        deleted=row.deleted_at is not None, cause=row.cause or "", left_out=row.left_out or {},
    )  # fmt: skip
