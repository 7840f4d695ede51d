"""Quarantine: versions that were taken back for being worse. The registry calls these inside its transactions."""

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from storage import audit
from storage.database import insert, now
from storage.tables import QuarantineRow, VersionRow


class Quarantined(RuntimeError):
    """A version that was taken back for being worse is not promoted again unless an operator says so outright."""


def put(session: Session, version: VersionRow, actor: str, reason: str) -> None:
    """Put a version into quarantine; one that is there already keeps its first reason."""
    row = insert(session, QuarantineRow).values(version_id=version.id, actor=actor, reason=reason, at=now(session))
    made = session.scalar(row.on_conflict_do_nothing().returning(QuarantineRow.version_id))
    if made is not None:
        audit.append(session, actor, "version.quarantine", subject(version), {}, {"quarantined": True}, reason)


def check(session: Session, version: VersionRow) -> None:
    """Raise `Quarantined` where the version is in quarantine."""
    row = session.get(QuarantineRow, version.id)
    if row is not None:
        raise Quarantined(
            f"version {version.number} of {version.drafter.name} is in quarantine since {row.at:%F %T} UTC "
            f"({row.reason}): promote it with --quarantined if that is meant"
        )


def release(session: Session, version: VersionRow, actor: str, reason: str) -> None:
    """Take a version out of quarantine, where it is in it; the audit log keeps that it was."""
    gone = delete(QuarantineRow).where(QuarantineRow.version_id == version.id).returning(QuarantineRow.version_id)
    if session.scalar(gone) is not None:
        audit.append(session, actor, "version.release", subject(version), {"quarantined": True}, {}, reason)


def reasons(session: Session, drafter_id: int) -> dict[int, str]:
    """Why a version is in quarantine, by version id."""
    found = select(QuarantineRow.version_id, QuarantineRow.reason).join(
        VersionRow, VersionRow.id == QuarantineRow.version_id
    )
    return dict(session.execute(found.where(VersionRow.drafter_id == drafter_id)).tuples().all())


def subject(version: VersionRow) -> str:
    return f"drafter/{version.drafter.name}/version/{version.number}"
