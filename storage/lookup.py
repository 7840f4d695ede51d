"""Finding the registry's rows inside a session.

What is asked for by name or number and is not there is an error that says what there is instead.
"""

from datetime import datetime

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from storage.tables import DrafterRow, EvaluationRow, EventRow, IntervalRow, PointerRow, VersionRow, WatchRow
from storage.views import Event, Interval, Pointer, Version, event_view, interval_view, version_view


class UnknownDrafter(LookupError):
    """No such drafter, or none that could be chosen; the message names those there are and what to do."""


class UnknownVersion(LookupError):
    """The drafter has no version of this number."""


def drafter_row(session: Session, name: str, lock: bool = False) -> DrafterRow:
    """The drafter called `name`; with `lock`, others that lock it wait until the transaction ends."""
    found = select(DrafterRow).where(DrafterRow.name == name)
    row = session.scalar(found.with_for_update() if lock else found)
    if row is None:
        known = ", ".join(session.scalars(select(DrafterRow.name).order_by(DrafterRow.name)))
        hint = f"there are {known}" if known else "there are none: run `redraft init NAME` to make one"
        raise UnknownDrafter(f"no drafter is called {name!r}; {hint}")
    return row


def version_row(session: Session, drafter: str, number: int) -> VersionRow:
    drafter_id = drafter_row(session, drafter).id
    row = session.scalar(of_drafter(drafter_id).where(VersionRow.number == number))
    if row is None:
        known = session.scalars(of_drafter(drafter_id).order_by(VersionRow.number)).all()
        raise UnknownVersion(f"{drafter} has no version {number}; it has 1 to {known[-1].number}")
    return row


def of_drafter(drafter_id: int) -> Select[VersionRow]:
    return select(VersionRow).where(VersionRow.drafter_id == drafter_id)


def made_from(session: Session, window_id: int, parent_id: int | None) -> VersionRow | None:
    """The version made from this window and parent; without a parent, the newest one of any."""
    found = select(VersionRow).where(VersionRow.window_id == window_id).order_by(VersionRow.number.desc())
    if parent_id is not None:
        found = found.where(VersionRow.parent_id == parent_id)
    return session.scalar(found.limit(1))


def newest_number(session: Session, drafter_id: int) -> int:
    return session.scalars(select(func.max(VersionRow.number)).where(VersionRow.drafter_id == drafter_id)).one()


def last_events(session: Session, drafter_id: int) -> dict[int, EventRow]:
    """By version id: the newest event that the version took part in, on either side."""
    events = select(EventRow).where(EventRow.drafter_id == drafter_id).order_by(EventRow.generation)
    last: dict[int, EventRow] = {}
    for event in session.scalars(events):
        if event.kind != "recall":  # for the live version a canary's coming and going is no event
            last[event.to_id] = event
        if event.from_id is not None and event.kind != "canary":
            last[event.from_id] = event
    return last


def evaluations(session: Session, drafter_id: int) -> dict[int, EvaluationRow]:
    """By the candidate's version id."""
    found = select(EvaluationRow).join(VersionRow, VersionRow.id == EvaluationRow.candidate_id)
    return {row.candidate_id: row for row in session.scalars(found.where(VersionRow.drafter_id == drafter_id))}


def numbers(session: Session, drafter_id: int) -> dict[int, int]:
    """Version numbers by version id."""
    found = select(VersionRow.id, VersionRow.number).where(VersionRow.drafter_id == drafter_id)
    return dict(session.execute(found).tuples().all())


def pointer_of(session: Session, drafter_id: int) -> Pointer:
    row = session.get_one(PointerRow, drafter_id)
    live = session.get_one(VersionRow, row.live_id)
    previous = session.get_one(VersionRow, row.previous_id) if row.previous_id is not None else None
    moves = select(EventRow.kind).where(EventRow.drafter_id == drafter_id, EventRow.generation == row.generation)
    canary = session.get_one(VersionRow, row.canary_id) if row.canary_id is not None else None
    shares = select(WatchRow.share).where(WatchRow.drafter_id == drafter_id, WatchRow.state == "open")
    share = session.scalar(shares) or 0.0  # of the version that was live before a move or a canary
    return Pointer(
        drafter=live.drafter.name,
        live=version_view(live),
        previous=version_view(previous) if previous else None,
        generation=row.generation,
        kind=session.scalars(moves).one(),
        holdback=0.0 if canary else share,
        canary=version_view(canary) if canary else None,
        canary_share=1.0 - share if canary else 0.0,
    )


def events(session: Session, drafter_id: int, limit: int) -> list[Event]:
    names = numbers(session, drafter_id)
    found = select(EventRow).where(EventRow.drafter_id == drafter_id).order_by(EventRow.generation.desc())
    return [event_view(row, names) for row in session.scalars(found.limit(limit))]


def intervals(session: Session, drafter_id: int) -> list[Interval]:
    names = numbers(session, drafter_id)
    found = select(IntervalRow).where(IntervalRow.drafter_id == drafter_id).order_by(IntervalRow.generation)
    return [interval_view(row, names) for row in session.scalars(found)]


def live_at(session: Session, drafter_id: int, when: datetime) -> Version | None:
    found = select(IntervalRow.version_id).where(
        IntervalRow.drafter_id == drafter_id,
        IntervalRow.started_at <= when,
        or_(IntervalRow.ended_at > when, IntervalRow.ended_at.is_(None)),
    )
    version_id = session.scalar(found)
    return None if version_id is None else version_view(session.get_one(VersionRow, version_id))
