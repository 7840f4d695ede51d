"""Targets that changed under a drafter: noticed, kept until the old target is back, and what goes on from there.

A drafter belongs to one target's weights. Where a server, its records or the trainer are found with other ones, the
drafter is stopped: it stays, with its versions and history, but nothing is learnt for it. A drafter of the new target
begins a new lineage; one that redraft made for that by itself is the old one's successor, and is chosen in its place.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Engine, delete, select
from sqlalchemy.orm import Session

from storage import audit, lookup
from storage.database import insert, now, reading, transaction
from storage.tables import DrafterRow, SuccessorRow, TargetChangeRow

Witness = Literal["server", "records", "trainer"]


@dataclass(frozen=True)
class TargetChange:
    drafter: str  # name
    made_for: str  # fingerprint of the target
    seen: str  # fingerprint of the other one
    witness: Witness
    seen_by: str
    at: datetime
    successor: str = ""  # name of a drafter that is for the other target, the newest

    @property
    def reason(self) -> str:
        """What happened and what can be done, in a sentence or two."""
        happened = (
            f"adaptation of {self.drafter} is stopped since {self.at:%F %T} UTC: {self.seen_by} has target "
            f"{self.seen[:12]}, and {self.drafter} was made for {self.made_for[:12]}"
        )
        if self.successor:
            return f"{happened}; drafter {self.successor} is for the new target"
        return (
            f"{happened}. Serve the old target again, or make a drafter for the new one: `redraft init NAME`, "
            "or REDRAFT_NEW_LINEAGE=auto, with which the trainer makes one"
        )


def notice(engine: Engine, drafter: str, seen: str, witness: Witness, seen_by: str) -> TargetChange | None:
    """Stop a drafter in whose target's place another one is seen; None where that was known, or it is its own."""
    with transaction(engine) as session:
        row = lookup.drafter_row(session, drafter, lock=True)
        if row.target_fingerprint == seen:
            return None
        known = session.get(TargetChangeRow, (row.id, witness))
        if known is not None and known.seen_fingerprint == seen:
            return None
        change = {"seen_fingerprint": seen, "seen_by": seen_by, "at": now(session)}
        found = insert(session, TargetChangeRow).values(drafter_id=row.id, witness=witness, **change)
        session.execute(found.on_conflict_do_update(index_elements=["drafter_id", "witness"], set_=change))
        before, after = {"target": row.target_fingerprint}, {"target": seen, "stopped": True}
        audit.append(session, seen_by, "drafter.target_changed", f"drafter/{drafter}", before, after, "")
        noticed = session.get_one(TargetChangeRow, (row.id, witness), populate_existing=True)
        return _change(session, noticed, row)


def settle(engine: Engine, drafter: str, by: str, witnesses: tuple[Witness, ...] = ("server", "records")) -> bool:
    """The drafter's own target was seen again by `by`: forget what these witnesses said; whether there was any.

    What another witness said stands, and the drafter stays stopped: so says the audit too.
    """
    with transaction(engine) as session:
        row = lookup.drafter_row(session, drafter, lock=True)
        here = TargetChangeRow.drafter_id == row.id
        told = delete(TargetChangeRow).where(here, TargetChangeRow.witness.in_(witnesses))
        gone = session.scalars(told.returning(TargetChangeRow.witness)).all()
        if gone:
            left = session.scalars(select(TargetChangeRow.witness).where(here)).all()
            before, after = {"stopped": True}, {"stopped": bool(left)}
            audit.append(session, by, "drafter.target_back", f"drafter/{drafter}", before, after, "")
        return bool(gone)


def stopped(engine: Engine) -> dict[str, TargetChange]:
    """The drafters that are stopped, by name, each with what was noticed first; retired ones are none of them."""
    found = (
        select(TargetChangeRow, DrafterRow)
        .join(DrafterRow, DrafterRow.id == TargetChangeRow.drafter_id)
        .where(DrafterRow.retired_at.is_(None))
        .order_by(TargetChangeRow.at.desc())
    )
    with reading(engine) as session:
        rows = session.execute(found).tuples().all()
        return {drafter.name: _change(session, row, drafter) for row, drafter in rows}


def successor(session: Session, drafter_id: int, target_fingerprint: str) -> DrafterRow | None:
    """The newest drafter that goes on from this one, or from one that does, for that target."""
    below, found = [drafter_id], None
    while below:
        rows = session.scalars(
            select(DrafterRow)
            .join(SuccessorRow, SuccessorRow.drafter_id == DrafterRow.id)
            .where(SuccessorRow.predecessor_id.in_(below), DrafterRow.retired_at.is_(None))
            .order_by(DrafterRow.id)
        ).all()
        below = [row.id for row in rows]
        fitting = [row for row in rows if row.target_fingerprint == target_fingerprint]
        found = fitting[-1] if fitting else found
    return found


def _change(session: Session, row: TargetChangeRow, drafter: DrafterRow) -> TargetChange:
    of_the_other = select(DrafterRow).where(
        DrafterRow.target_fingerprint == row.seen_fingerprint, DrafterRow.retired_at.is_(None)
    )
    goes_on = session.scalars(of_the_other.order_by(DrafterRow.id.desc()).limit(1)).first()
    witness: Witness = row.witness  # type: ignore[assignment]
    return TargetChange(
        drafter=drafter.name,
        made_for=drafter.target_fingerprint,
        seen=row.seen_fingerprint,
        witness=witness,
        seen_by=row.seen_by,
        at=row.at,
        successor=goes_on.name if goes_on else "",
    )
