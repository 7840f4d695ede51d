"""Files of the weights store that nothing refers to: left by a crash between the file and its SQL row."""

import time

import structlog
from sqlalchemy import Engine, select

from storage.database import reading
from storage.tables import VersionRow, WindowRow
from storage.weights import WeightsStore

log = structlog.get_logger()


def orphans(engine: Engine, store: WeightsStore, older_than_hours: float) -> list[str]:
    """Digests that no version and no window names, last put longer ago than that; by digest."""
    old = [digest for digest in store.digests() if _age_hours(store.modified(digest)) > older_than_hours]
    with reading(engine) as session:  # after the files were listed: a row written meanwhile is seen
        named = {
            *session.scalars(select(VersionRow.weights_sha256)),
            *session.scalars(select(WindowRow.sha256)),
        }
    return sorted(set(old) - named)


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
