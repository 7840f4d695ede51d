"""Files of the weights store that nothing refers to: past their retention, or left by a crash between file and row."""

import time
from collections.abc import Iterator

import structlog
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from storage import reservoirs
from storage.database import reading
from storage.tables import MarkRow, TrainingRow, VersionRow, WindowRow
from storage.weights import WeightsStore

log = structlog.get_logger()


def orphans(engine: Engine, store: WeightsStore, older_than_hours: float) -> list[str]:
    """Digests that no version and no window names, last put longer ago than that; by digest."""
    old = [digest for digest in store.digests() if _age_hours(store.modified(digest)) > older_than_hours]
    with reading(engine) as session:  # after the files were listed: a row written meanwhile is seen
        return sorted(set(old) - set(named(session)))


def named(session: Session) -> Iterator[str]:
    """The digests that rows name: of versions and windows that are kept (`storage/retention`), and what goes with them.

    That is the optimiser's moments beside a version's weights, and the reservoirs that the next runs go on from.
    """
    deleted = select(MarkRow.version_id).where(MarkRow.kind == "weights_deleted")
    yield from session.scalars(select(VersionRow.weights_sha256).where(VersionRow.id.not_in(deleted)))
    yield from session.scalars(select(WindowRow.sha256).where(WindowRow.deleted_at.is_(None)))
    moments = select(TrainingRow.moments_sha256).where(TrainingRow.version_id.not_in(deleted))
    yield from (digest for digest in session.scalars(moments) if digest)
    yield from reservoirs.in_use(session)


def collect(engine: Engine, store: WeightsStore, older_than_hours: float) -> int:
    """Delete the orphans and old temporary files; how many went."""
    found = orphans(engine, store, older_than_hours)
    for digest in found:
        store.delete(digest)
    stale = [path for path in store.temporaries() if _age_hours(path.stat().st_mtime) > older_than_hours]
    for path in stale:
        path.unlink(missing_ok=True)
    if found or stale:
        log.info("garbage.collected", orphans=len(found), temporaries=len(stale))
    return len(found) + len(stale)


def _age_hours(modified: float) -> float:
    return (time.time() - modified) / 3600
