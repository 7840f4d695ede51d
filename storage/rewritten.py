"""Windows written again without a tenant's records: the new file, then the rows, then the old file deleted.

A crash in between leaves an orphan, or an old file that the next attempt finds through the purge's row. Whoever
writes windows or versions holds the drafter's lock, and so does this, so that a run cannot keep what it read before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
import structlog
from sqlalchemy import Engine, delete, select
from sqlalchemy.orm import Session

from storage.database import now, reading, transaction
from storage.exposure import trained_on
from storage.tables import DrafterRow, FoldedRow, PurgeRow, WindowPurgeRow, WindowRecordRow, WindowRow
from storage.weights import BlobDamaged, WeightsStore
from storage.windows import WindowRecords, packed, unpacked

log = structlog.get_logger()
BATCH = 500  # ids a statement; SQLite bounds the number of its parameters


@dataclass(frozen=True)
class PurgedWindow:
    """A window as a purge left it."""

    window: int
    tenant: str
    trained: dict[int, int]  # version id: how many of the records taken out it was trained on
    after_sha256: str
    at: datetime


def without_tenant(engine: Engine, blobs: WeightsStore, purge_id: int, tenant: str) -> None:
    """Take the tenant's records out of all windows, and delete the files that held them."""
    with reading(engine) as session:
        windows = windows_with(session, tenant)
    for window_id in windows:
        while not _rewritten(engine, blobs, purge_id, tenant, window_id):
            pass
    _delete_old_files(engine, blobs, purge_id)


def purged_windows(engine: Engine, windows: Iterable[int]) -> list[PurgedWindow]:
    """What purges did to these windows, oldest first."""
    changed = select(WindowPurgeRow, PurgeRow).join(PurgeRow).where(WindowPurgeRow.window_id.in_(list(windows)))
    with reading(engine) as session:
        rows = session.execute(changed.order_by(WindowPurgeRow.at)).tuples()
        return [
            PurgedWindow(w.window_id, p.tenant, {int(v): n for v, n in w.trained.items()}, w.after_sha256, w.at)
            for w, p in rows
        ]


def lock_drafters(session: Session) -> None:
    """Hold out whoever keeps windows or adds versions, of all drafters; rows that refer to them can be written."""
    session.scalars(select(DrafterRow.id).order_by(DrafterRow.id).with_for_update(key_share=True)).all()


def windows_with(session: Session, tenant: str) -> list[int]:
    found = select(WindowRecordRow.window_id).where(WindowRecordRow.tenant == tenant).distinct()
    return list(session.scalars(found.order_by(WindowRecordRow.window_id)))


def _rewritten(engine: Engine, blobs: WeightsStore, purge_id: int, tenant: str, window_id: int) -> bool:
    """Write a window's file again without the tenant's records; False where another purge changed it meanwhile.

    The new file first, then the rows: a crash between them leaves an orphan, and the window as it was.
    """
    with reading(engine) as session:
        before = session.get_one(WindowRow, window_id)
        digest, gone = before.sha256, before.deleted_at is not None
    kept = None if gone else _without(blobs, digest, tenant, window_id)
    after = blobs.put(packed(kept)).sha256 if kept else digest
    with transaction(engine) as session:
        lock_drafters(session)
        row = session.get_one(WindowRow, window_id, with_for_update=True)
        if row.sha256 != digest:
            return False
        training, holdout = _forget_records(session, window_id, tenant)
        trained = trained_on(session, [(window_id, record_id) for record_id in training])
        session.add(
            WindowPurgeRow(
                purge_id=purge_id, window_id=window_id, training=len(training), holdout=len(holdout),
                trained={str(version): count for version, count in trained.items()},
                before_sha256=digest, after_sha256=after, at=now(session),
            )
        )  # fmt: skip
        if kept:
            row.sha256, row.training, row.holdout = after, len(kept.training), len(kept.holdout)
    return True


def _without(blobs: WeightsStore, digest: str, tenant: str, window_id: int) -> WindowRecords:
    """The window's other records. A file that cannot be read is not worth keeping: nothing is left of it."""
    try:
        records = unpacked(blobs.get(digest))
    except (BlobDamaged, msgspec.MsgspecError) as error:
        log.warning("purge.window_unreadable", window=window_id, error=str(error))
        return WindowRecords((), ())
    training, holdout = (tuple(r for r in part if r.tenant != tenant) for part in (records.training, records.holdout))
    return WindowRecords(training, holdout)


def _forget_records(session: Session, window_id: int, tenant: str) -> tuple[list[str], list[str]]:
    """Delete the rows of the tenant's records in this window; the ids of its training and of its holdout part."""
    rows = delete(WindowRecordRow).where(WindowRecordRow.window_id == window_id, WindowRecordRow.tenant == tenant)
    gone = session.execute(rows.returning(WindowRecordRow.record_id, WindowRecordRow.part)).tuples().all()
    forget_folded(session, [record_id for record_id, _ in gone])
    training, holdout = ([i for i, found in gone if found == part] for part in ("training", "holdout"))
    return training, holdout


def forget_folded(session: Session, ids: Sequence[str]) -> None:
    for start in range(0, len(ids), BATCH):
        session.execute(delete(FoldedRow).where(FoldedRow.record_id.in_(ids[start : start + BATCH])))


def _delete_old_files(engine: Engine, blobs: WeightsStore, purge_id: int) -> None:
    """The files that windows had before. After a crash between the row and the file they are found here again."""
    with reading(engine) as session:
        old = session.scalars(select(WindowPurgeRow.before_sha256).where(WindowPurgeRow.purge_id == purge_id)).all()
        named = set(session.scalars(select(WindowRow.sha256).where(WindowRow.deleted_at.is_(None))))
    for digest in set(old) - named:
        blobs.delete(digest)
