"""How many records the guards kept out of the windows, by guard: running totals, and the newest reason of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from storage import lookup
from storage.database import insert, now, reading, transaction
from storage.tables import LeftOutRow


@dataclass(frozen=True)
class LeftOut:
    """What one guard kept out of all windows of a drafter."""

    guard: str
    records: int
    reason: str  # of the newest
    at: datetime


def count(engine: Engine, drafter: str, records: Mapping[str, int], reasons: Mapping[str, str]) -> None:
    """Add `records` by guard to the totals."""
    with transaction(engine) as session:
        owner = lookup.drafter_row(session, drafter).id
        for guard in sorted(records):
            _add(session, owner, guard, records[guard], reasons.get(guard, ""))


def totals(engine: Engine, drafter: str) -> list[LeftOut]:
    with reading(engine) as session:
        owner = lookup.drafter_row(session, drafter).id
        found = select(LeftOutRow).where(LeftOutRow.drafter_id == owner).order_by(LeftOutRow.guard)
        return [LeftOut(row.guard, row.records, row.reason, row.at) for row in session.scalars(found)]


def _add(session: Session, drafter_id: int, guard: str, records: int, reason: str) -> None:
    row = insert(session, LeftOutRow).values(
        drafter_id=drafter_id, guard=guard, records=records, reason=reason, at=now(session)
    )
    more = {"records": LeftOutRow.records + row.excluded.records, "reason": row.excluded.reason, "at": row.excluded.at}
    session.execute(row.on_conflict_do_update(index_elements=["drafter_id", "guard"], set_=more))
