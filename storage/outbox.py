"""The outbox: messages written in the transaction of the change they announce, sent after its commit.

A message lost between the two is sent again by the sweeper; who listens must bear hearing it twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from storage.database import now, reading, transaction
from storage.tables import OutboxRow

POINTER_TOPIC = "pointer"  # payload: {"drafter": name, "generation": n}
ROUTES_TOPIC = "routes"  # payload: {"target": fingerprint, "generation": n}


@dataclass(frozen=True)
class Message:
    id: int
    topic: str
    payload: dict[str, Any]


def add(session: Session, topic: str, payload: dict[str, Any]) -> None:
    session.add(OutboxRow(topic=topic, payload=payload, created_at=now(session)))


def pending(engine: Engine, limit: int = 100) -> list[Message]:
    """What is still to be sent, oldest first."""
    waiting = select(OutboxRow).where(OutboxRow.sent_at.is_(None)).order_by(OutboxRow.id).limit(limit)
    with reading(engine) as session:
        return [Message(row.id, row.topic, row.payload) for row in session.scalars(waiting)]


def mark_sent(engine: Engine, ids: Sequence[int]) -> None:
    with transaction(engine) as session:
        session.execute(update(OutboxRow).where(OutboxRow.id.in_(ids)).values(sent_at=now(session)))
