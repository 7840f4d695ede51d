"""The audit log: who changed what, when and why, each row chained to the one before by its hash.

Appended inside the transaction of the change itself. `verify` finds an edited, inserted or removed row; rows
cut off the end show only against a hash that was noted elsewhere.
"""

import json
from hashlib import sha256
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from storage.database import exclusive, now, reading
from storage.tables import AuditRow

AUDIT_LOCK = 0x7265647261667402  # see database.exclusive
START = "0" * 64


def append(
    session: Session,
    actor: str,
    action: str,
    subject: str,
    before: dict[str, Any],
    after: dict[str, Any],
    reason: str,
) -> None:
    """Add a row to the chain; the caller's transaction keeps it or drops it with the change."""
    exclusive(session, AUDIT_LOCK)
    last = session.scalar(select(AuditRow.hash).order_by(AuditRow.id.desc()).limit(1))
    row = AuditRow(
        at=now(session), actor=actor, action=action, subject=subject, before=before, after=after,
        reason=reason, previous_hash=last or START,
    )  # fmt: skip
    row.hash = _hash(row)
    session.add(row)
    session.flush()


def verify(engine: Engine) -> int | None:
    """The id of the first row that does not follow from the one before it; None where the chain is whole."""
    with reading(engine) as session:
        previous = START
        for row in session.scalars(select(AuditRow).order_by(AuditRow.id).execution_options(yield_per=500)):
            if row.previous_hash != previous or row.hash != _hash(row):
                return row.id
            previous = row.hash
    return None


def _hash(row: AuditRow) -> str:
    content = [
        row.previous_hash, row.at.isoformat(timespec="microseconds"), row.actor, row.action, row.subject,
        row.before, row.after, row.reason,
    ]  # fmt: skip
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
