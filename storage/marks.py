"""Marks on versions: pinned, weights deleted (`storage/retention`), withdrawn (`storage/purge`).

A version is never edited; what is said of it later stands beside it. Whatever makes a version live asks
`check_servable` first, under the pointer's lock, and whoever sets a mark holds that lock too.
"""

from collections.abc import Iterable

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from storage import audit, lookup, pointer, quarantine
from storage.database import now, transaction
from storage.tables import IntervalRow, MarkRow, PointerRow, VersionRow

PINNED, WEIGHTS_DELETED, WITHDRAWN = "pinned", "weights_deleted", "withdrawn"
UNSERVABLE = (WEIGHTS_DELETED, WITHDRAWN)


class VersionRefused(RuntimeError):
    """A version that cannot be served any more; the message says why and what to do."""


def of_drafter(session: Session, drafter_id: int) -> dict[int, dict[str, MarkRow]]:
    """Marks by version id and kind."""
    found = select(MarkRow).join(VersionRow).where(VersionRow.drafter_id == drafter_id)
    marks: dict[int, dict[str, MarkRow]] = {}
    for row in session.scalars(found):
        marks.setdefault(row.version_id, {})[row.kind] = row
    return marks


def put(session: Session, version_id: int, kind: str, actor: str, reason: str) -> bool:
    """Set a mark; False where it is set already, and the first reason stays."""
    if session.get(MarkRow, (version_id, kind)) is not None:
        return False
    session.add(MarkRow(version_id=version_id, kind=kind, actor=actor, reason=reason, at=now(session)))
    session.flush()
    return True


def remove(session: Session, version_id: int, kind: str) -> bool:
    """Take a mark away; False where there is none."""
    row = session.get(MarkRow, (version_id, kind))
    if row is None:
        return False
    session.delete(row)
    session.flush()
    return True


def pin(engine: Engine, drafter: str, number: int, pinned: bool, actor: str) -> None:
    """Keep a version's weights whatever their age, or no longer; raises `VersionRefused` where they are gone."""
    with transaction(engine) as session:
        version = lookup.version_row(session, drafter, number)
        pointer.lock(session, version.drafter_id)
        if pinned:
            check_servable(session, version)
            changed = put(session, version.id, PINNED, actor, "by hand")
        else:
            changed = remove(session, version.id, PINNED)
        if changed:
            subject = f"drafter/{drafter}/version/{number}"
            audit.append(session, actor, "version.pin", subject, {"pinned": not pinned}, {"pinned": pinned}, "")


def restored(engine: Engine, drafter: str, number: int, actor: str) -> None:
    """The weights of a version are there again, as they were: it can be served like any other."""
    with transaction(engine) as session:
        version = lookup.version_row(session, drafter, number)
        pointer.lock(session, version.drafter_id)
        if remove(session, version.id, WEIGHTS_DELETED):
            subject = f"drafter/{drafter}/version/{number}"
            audit.append(session, actor, "version.restore", subject, {"weights": "deleted"}, {}, "trained again")


def check_servable(session: Session, version: VersionRow) -> None:
    """Raise `VersionRefused` where a mark forbids that `version` is made live."""
    name = f"version {version.number} of {version.drafter.name}"
    withdrawn = session.get(MarkRow, (version.id, WITHDRAWN))
    if withdrawn is not None:
        raise VersionRefused(f"{name} was withdrawn: {withdrawn.reason}; choose another (`redraft versions`)")
    deleted = session.get(MarkRow, (version.id, WEIGHTS_DELETED))
    if deleted is not None:
        raise VersionRefused(
            f"the weights of {name} were deleted on {deleted.at:%F}: {deleted.reason}. "
            f"`redraft reproduce {version.number} --restore` makes them again, if its lineage is whole"
        )


def fallback(session: Session, points: PointerRow, without: Iterable[int] = ()) -> VersionRow | None:
    """What to go back to when nobody names it: the previous version, else the last one that was live before.

    Versions that cannot be served any more, that were taken back, or that are in `without` (ids) are passed over.
    """
    unfit = {points.live_id, *without, *_unservable(session, points.drafter_id), *_taken_back(session, points)}
    lives = select(IntervalRow.version_id).where(IntervalRow.drafter_id == points.drafter_id)
    past = session.scalars(lives.order_by(IntervalRow.generation.desc())).all()
    fit = [i for i in (points.previous_id, *past) if i is not None and i not in unfit]
    return session.get_one(VersionRow, fit[0]) if fit else None


def _unservable(session: Session, drafter_id: int) -> set[int]:
    found = select(MarkRow.version_id).join(VersionRow).where(VersionRow.drafter_id == drafter_id)
    return {*session.scalars(found.where(MarkRow.kind.in_(UNSERVABLE))), *quarantine.reasons(session, drafter_id)}


def _taken_back(session: Session, points: PointerRow) -> set[int]:
    last = lookup.last_events(session, points.drafter_id)
    return {i for i, event in last.items() if event.kind == "rollback" and event.from_id == i} - {points.previous_id}
