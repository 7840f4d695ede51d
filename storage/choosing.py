"""Which drafter is meant by a name, or by none, for a target. Retired ones are none of those to choose from."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage import lookup, routes, target_changes
from storage.lookup import UnknownDrafter
from storage.tables import DrafterRow


class WrongDrafter(ValueError):
    """A version or drafter that was made for another drafter or another target."""


def named(session: Session, name: str, target_fingerprint: str | None) -> DrafterRow:
    """The drafter called `name`, or where it was made for another target, its successor for this one."""
    row = lookup.drafter_row(session, name)
    if target_fingerprint not in (None, row.target_fingerprint):
        row = target_changes.successor(session, row.id, str(target_fingerprint)) or row
    if row.retired_at is not None:
        raise UnknownDrafter(f"drafter {row.name} is retired: set REDRAFT_DRAFTER to another one")
    if target_fingerprint not in (None, row.target_fingerprint):
        raise WrongDrafter(
            f"drafter {row.name} was made for another target ({row.target_fingerprint[:12]}; this one "
            f"is {str(target_fingerprint)[:12]}): choose another or run `redraft init NAME` for this one"
        )
    return row


def general(session: Session, target_fingerprint: str | None) -> DrafterRow:
    """The only drafter of this target that is for all workloads; of any target where none is given."""
    present = session.scalars(select(DrafterRow).where(DrafterRow.retired_at.is_(None)).order_by(DrafterRow.id))
    rows = {row.id: row for row in present if target_fingerprint in (None, row.target_fingerprint)}
    if not rows:
        raise UnknownDrafter("there is no drafter for this target: run `redraft init NAME` to make one")
    chosen = routes.general_among(session, rows.keys())
    found = [row for row in rows.values() if row.id in chosen]
    if len(found) > 1:
        names = ", ".join(row.name for row in found)
        raise UnknownDrafter(f"there are several drafters ({names}): set REDRAFT_DRAFTER to one of them")
    return found[0]
