"""Windows of feedback: what one update learns from, kept before the stream is acknowledged.

The records lie in the weights store as one file; the row says where, and the record rows that each record is
used once, however often it arrives. A window is open until its update is decided.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec
from sqlalchemy import Engine, insert, select
from sqlalchemy.orm import Session

from storage import lookup
from storage.database import now, reading, transaction
from storage.jobs import Lease, hold
from storage.records import FeedbackRecord
from storage.tables import DrafterRow, WindowRecordRow, WindowRow
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
    ) -> Window | None:
        """Store the records that no window has yet; None where all are known. Raises `WindowOpen`."""
        with transaction(self.engine) as session:
            if lease is not None:
                hold(session, lease)
            owner = lookup.drafter_row(session, drafter, lock=True)
            if (waiting := _open_row(session, owner.id)) is not None:
                raise WindowOpen(f"window {waiting.id} of {drafter} is open: decide it first")
            seen = _known(session, [r.record_id for r in (*training, *holdout)])
            fresh = WindowRecords(_unseen(training, seen), _unseen(holdout, seen))
            if not fresh.training and not fresh.holdout:
                return None
            return _window(self._store(session, owner, fresh), drafter)

    def known(self, record_ids: Iterable[str]) -> set[str]:
        """Those of the ids that some window has."""
        with reading(self.engine) as session:
            return _known(session, list(record_ids))

    def close(self, window: Window, outcome: str, lease: Lease | None = None) -> None:
        """The window is decided: "promoted", "refused", "failed". Closing it again changes nothing."""
        with transaction(self.engine) as session:
            if lease is not None:
                hold(session, lease)
            row = session.get_one(WindowRow, window.id)
            if row.state == "open":
                row.state, row.outcome, row.closed_at = "closed", outcome, now(session)

    def recent(self, drafter: str, limit: int) -> list[Window]:
        """The newest windows first, open or closed."""
        with reading(self.engine) as session:
            owner = lookup.drafter_row(session, drafter).id
            found = select(WindowRow).where(WindowRow.drafter_id == owner).order_by(WindowRow.id.desc())
            return [_window(row, drafter) for row in session.scalars(found.limit(limit))]

    def records(self, window: Window) -> WindowRecords:
        """The window's records, from the store; raises `BlobDamaged`."""
        return WindowRecords(*_decoder.decode(self.blobs.get(window.sha256)))

    def _store(self, session: Session, owner: DrafterRow, fresh: WindowRecords) -> WindowRow:
        """The file first, then the rows: a crash between them leaves an orphan file and nothing else."""
        blob = self.blobs.put(msgspec.msgpack.encode((fresh.training, fresh.holdout)))
        row = WindowRow(
            drafter_id=owner.id, sha256=blob.sha256, training=len(fresh.training), holdout=len(fresh.holdout),
            state="open", outcome="", created_at=now(session),
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
    return Window(row.id, drafter, row.sha256, row.training, row.holdout, row.state, row.outcome, row.created_at)
