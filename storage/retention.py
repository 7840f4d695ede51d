"""How long weights and windows are kept. Rows stay; here they are marked, and `storage/garbage` deletes the files.

Marking comes first and takes the pointer's lock: a version that is marked cannot be made live, one that is live
cannot be marked, and a crash between mark and file leaves a file that no row names, which goes the next time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog
from sqlalchemy import Engine, func, or_, select
from sqlalchemy.orm import Session

from storage import marks, pointer
from storage.config import setting
from storage.database import now, reading, transaction
from storage.tables import DrafterRow, IntervalRow, MarkRow, PointerRow, VersionRow, WindowRow

log = structlog.get_logger()
ACTOR = "retention"
UNNEEDED = "it is not among the newest {} versions or the last {} that were live, nor pinned"


@dataclass(frozen=True)
class RetentionConfig:
    """What is kept of the past. Rows, with all figures, are kept always."""

    versions_kept: int = setting(
        20,
        "newest versions of a drafter whose weights are kept, besides version 1 and those that are live, previous, "
        "pinned or in `rollbacks_kept`",
    )
    rollbacks_kept: int = setting(5, "versions that were live before the present one whose weights are kept")
    windows_kept: int = setting(
        500, "newest windows of a drafter whose records are kept; without its windows a version cannot be reproduced"
    )
    windows_days: float = setting(90.0, "age at which a window's records are deleted")
    servers_hours: float = setting(24.0, "hours since its last sign of life after which a server's row is deleted")


def expire(engine: Engine, config: RetentionConfig) -> int:
    """Mark what is past its time, drafter by drafter; how many versions and windows that were."""
    with reading(engine) as session:
        drafters = session.scalars(select(DrafterRow.id).order_by(DrafterRow.id)).all()
    versions = sum(_expire_versions(engine, drafter_id, config) for drafter_id in drafters)
    windows = sum(_expire_windows(engine, drafter_id, config) for drafter_id in drafters)
    if versions or windows:
        log.info("retention.expired", versions=versions, windows=windows)
    return versions + windows


def _expire_versions(engine: Engine, drafter_id: int, config: RetentionConfig) -> int:
    with transaction(engine) as session:
        points = pointer.lock(session, drafter_id)
        numbered = select(VersionRow).where(VersionRow.drafter_id == drafter_id).order_by(VersionRow.number.desc())
        versions, marked = session.scalars(numbered).all(), marks.of_drafter(session, drafter_id)
        kept = {*_in_use(session, points), *_kept(session, points, versions, marked, config)}
        reason = UNNEEDED.format(config.versions_kept, config.rollbacks_kept)
        return sum(_expire_version(session, v.id, marked.get(v.id, {}), reason) for v in versions if v.id not in kept)


def _expire_version(session: Session, version_id: int, marked: dict[str, MarkRow], reason: str) -> bool:
    withdrawn = marked.get(marks.WITHDRAWN)
    return marks.put(session, version_id, marks.WEIGHTS_DELETED, ACTOR, withdrawn.reason if withdrawn else reason)


def _in_use(session: Session, points: PointerRow) -> Iterator[int]:
    """Versions that may be loaded at any moment: those of the pointer, and of an update that is not decided yet."""
    yield from (i for i in (points.live_id, points.previous_id, points.canary_id) if i is not None)
    undecided = select(VersionRow).join(WindowRow, WindowRow.id == VersionRow.window_id)
    for row in session.scalars(undecided.where(VersionRow.drafter_id == points.drafter_id, WindowRow.state == "open")):
        yield from (i for i in (row.id, row.parent_id) if i is not None)


def _kept(
    session: Session,
    points: PointerRow,
    versions: Sequence[VersionRow],
    marked: dict[int, dict[str, MarkRow]],
    config: RetentionConfig,
) -> Iterator[int]:
    """Versions worth keeping, of all the drafter's, newest first. What was withdrawn is not."""
    yield from (v.id for v in versions if v.number == 1 or marks.PINNED in marked.get(v.id, {}))
    newest = [v.id for v in versions[: config.versions_kept]]
    for version_id in (*newest, *_lived(session, points)[: config.rollbacks_kept]):
        if marks.WITHDRAWN not in marked.get(version_id, {}):
            yield version_id


def _lived(session: Session, points: PointerRow) -> list[int]:
    """Versions that were live before the present one, the last one first."""
    last = func.max(IntervalRow.generation)
    past = IntervalRow.drafter_id == points.drafter_id, IntervalRow.version_id != points.live_id
    found = select(IntervalRow.version_id).where(*past)
    return list(session.scalars(found.group_by(IntervalRow.version_id).order_by(last.desc())))


def _expire_windows(engine: Engine, drafter_id: int, config: RetentionConfig) -> int:
    with transaction(engine) as session:
        session.get_one(DrafterRow, drafter_id, with_for_update={"key_share": True})  # as who writes windows does
        numbered = select(WindowRow.id).where(WindowRow.drafter_id == drafter_id).order_by(WindowRow.id.desc())
        newest = session.scalars(numbered.limit(config.windows_kept)).all()
        moment = now(session)
        past = (
            select(WindowRow)
            .where(WindowRow.drafter_id == drafter_id, WindowRow.state == "closed", WindowRow.deleted_at.is_(None))
            .where(
                or_(
                    WindowRow.id < min(newest, default=0),
                    WindowRow.created_at < moment - timedelta(days=config.windows_days),
                )
            )
        )
        rows = session.scalars(past).all()
        for row in rows:
            row.deleted_at = moment
        return len(rows)
