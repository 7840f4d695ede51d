"""Moving the live pointer: what is served changes here and nowhere else, and everything about it in one go.

The registry calls these inside its transaction: the pointer row, the live intervals, the event, the
audit row and the outbox message are kept together or not at all.
"""

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from storage import audit, outbox, watches
from storage.database import now
from storage.tables import DrafterRow, EventRow, IntervalRow, PointerRow, VersionRow

State = dict[str, Any]  # what the audit row says of the pointer


class PointerMoved(RuntimeError):
    """The version expected to be live is not (any more): look at what is, and decide again."""


class CanaryOut(RuntimeError):
    """Another version serves a share of the requests as a canary: nothing else is promoted before that has ended."""


def lock(session: Session, drafter_id: int) -> PointerRow:
    """The pointer, which nobody else can move until the transaction ends."""
    return session.scalars(select(PointerRow).where(PointerRow.drafter_id == drafter_id).with_for_update()).one()


def start(
    session: Session,
    drafter: DrafterRow,
    weights_sha256: str,
    size_bytes: int,
    actor: str,
    parent: VersionRow | None = None,
) -> VersionRow:
    """Give a new drafter its version 1, which may descend from another drafter's, and point at it as generation 1."""
    first = VersionRow(
        drafter=drafter, number=1, parent=parent, weights_sha256=weights_sha256, size_bytes=size_bytes,
        created_at=drafter.created_at,
    )  # fmt: skip
    session.add(first)
    session.flush()
    session.add(PointerRow(drafter_id=first.drafter_id, live_id=first.id, generation=1))
    _tell(session, "init", None, first, 1, actor, f"drafter {drafter.name} was made")
    return first


def make_live(
    session: Session, to: VersionRow, expecting: VersionRow, actor: str, reason: str, holdback: float
) -> None:
    """Promote; with a holdback, that share of the requests stays, and the watch over it begins."""
    _move(session, "promote", to, expecting, expecting.id, actor, reason)
    if holdback > 0:
        watches.start(session, to, expecting, lock(session, to.drafter_id).generation, holdback)
        session.flush()


def send_out(session: Session, canary: VersionRow, live: VersionRow, actor: str, reason: str) -> int:
    """Let a version serve a share of the requests as a canary beside the live one; the generation."""
    pointer = lock(session, canary.drafter_id)
    watches.stop(session, canary.drafter_id, "overtaken", f"version {canary.number} went out as a canary: {reason}")
    pointer.canary_id = canary.id
    pointer.generation += 1
    session.flush()
    _tell_canary(session, "canary", canary, live, pointer.generation, actor, reason)
    return pointer.generation


def recall(session: Session, pointer: PointerRow, state: str, actor: str, reason: str) -> None:
    """End the canary that is out; the live version serves all requests again. `state` is what its watch ends with."""
    canary, live = (session.get_one(VersionRow, i) for i in (pointer.canary_id, pointer.live_id))
    watches.stop(session, pointer.drafter_id, state, reason)
    pointer.canary_id = None
    pointer.generation += 1
    session.flush()
    _tell_canary(session, "recall", canary, live, pointer.generation, actor, reason)


def check_canary(session: Session, pointer: PointerRow, to: VersionRow) -> None:
    """Raise `CanaryOut` where another version than `to` is out."""
    if pointer.canary_id not in (None, to.id):
        canary = session.get_one(VersionRow, pointer.canary_id)
        raise CanaryOut(
            f"version {canary.number} of {to.drafter.name} is out as a canary: wait for its end (`redraft watch`), "
            "or recall it (`redraft rollback`)"
        )


def roll_back(session: Session, to: VersionRow, expecting: VersionRow, actor: str, reason: str) -> None:
    """Afterwards `previous` is what `to` had replaced, so that rolling back again goes further back."""
    _move(session, "rollback", to, expecting, _replaced_by(session, to), actor, reason)


def take_back(session: Session, to: VersionRow, expecting: VersionRow, actor: str, reason: str) -> None:
    """Roll back because the watch, or the floor, found the live version worse: its watch ends with that."""
    watches.stop(session, to.drafter_id, "worse", reason)
    roll_back(session, to, expecting, actor, reason)


def _replaced_by(session: Session, version: VersionRow) -> int | None:
    moves = select(EventRow.from_id).where(EventRow.to_id == version.id, EventRow.kind.in_(("init", "promote")))
    return session.scalar(moves.order_by(EventRow.generation.desc()).limit(1))


def _move(
    session: Session,
    kind: str,
    to: VersionRow,
    expecting: VersionRow,
    previous_id: int | None,
    actor: str,
    reason: str,
) -> None:
    """Compare and set: point at `to` if `expecting` is live. Another version that is out as a canary is recalled."""
    pointer = lock(session, to.drafter_id)
    if pointer.canary_id not in (None, to.id) and pointer.live_id == expecting.id:
        recall(session, pointer, "overtaken", actor, f"{kind} to version {to.number}: {reason}")
    moved = (
        update(PointerRow)
        .where(PointerRow.drafter_id == to.drafter_id, PointerRow.generation == pointer.generation)
        .where(PointerRow.live_id == expecting.id)
        .values(live_id=to.id, previous_id=previous_id, canary_id=None, generation=PointerRow.generation + 1)
        .returning(PointerRow.generation)
    )
    generation = session.execute(moved).scalar_one_or_none()
    if generation is None:
        live = session.get_one(VersionRow, pointer.live_id)
        raise PointerMoved(
            f"version {live.number} of {to.drafter.name} is live, not version {expecting.number}: "
            f"version {to.number} was not made live"
        )
    session.refresh(pointer)
    watches.stop(session, to.drafter_id, "overtaken", f"{kind} to version {to.number} by {actor}: {reason}")
    _tell(session, kind, expecting, to, generation, actor, reason)


def _tell(
    session: Session,
    kind: str,
    before: VersionRow | None,
    to: VersionRow,
    generation: int,
    actor: str,
    reason: str,
) -> None:
    """Write down a move of what is live."""
    _turn_interval(session, to, generation)
    was = {"live": before.number, "generation": generation - 1} if before else {}
    becomes = {"live": to.number, "generation": generation}
    _keep(session, kind, before, to, actor, reason, was, becomes)


def _tell_canary(
    session: Session, kind: str, canary: VersionRow, live: VersionRow, generation: int, actor: str, reason: str
) -> None:
    """Write down that a canary came, an event from the live version to it, or went ("recall"), the other way round."""
    none: State = {"live": live.number, "canary": None, "generation": generation}
    out: State = {**none, "canary": canary.number}
    if kind == "canary":
        _keep(session, kind, live, canary, actor, reason, {**none, "generation": generation - 1}, out)
    else:
        _keep(session, kind, canary, live, actor, reason, {**out, "generation": generation - 1}, none)


def _keep(
    session: Session,
    kind: str,
    before: VersionRow | None,
    to: VersionRow,
    actor: str,
    reason: str,
    was: State,
    becomes: State,
) -> None:
    """The event, the audit row, and the message to the servers."""
    generation = becomes["generation"]
    session.add(
        EventRow(
            drafter_id=to.drafter_id, kind=kind, from_id=before.id if before else None, to_id=to.id,
            generation=generation, actor=actor, reason=reason, at=now(session),
        )
    )  # fmt: skip
    audit.append(session, actor, f"pointer.{kind}", f"drafter/{to.drafter.name}", was, becomes, reason)
    outbox.add(session, outbox.POINTER_TOPIC, {"drafter": to.drafter.name, "generation": generation})


def _turn_interval(session: Session, to: VersionRow, generation: int) -> None:
    """Close the open interval and open the next at that moment; a clock set back cannot turn it round."""
    moment = now(session)
    open_one = session.scalar(
        select(IntervalRow).where(IntervalRow.drafter_id == to.drafter_id, IntervalRow.ended_at.is_(None))
    )
    if open_one is not None:
        moment = max(moment, open_one.started_at)
        open_one.ended_at = moment
        session.flush()  # before the next one opens: only one may be open
    session.add(IntervalRow(drafter_id=to.drafter_id, version_id=to.id, generation=generation, started_at=moment))
