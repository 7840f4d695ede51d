"""The outbox: pending until marked, oldest first."""

from sqlalchemy import Engine

from storage.database import transaction
from storage.outbox import add, mark_sent, pending


def test_messages_are_pending_until_they_are_marked_as_sent(engine: Engine) -> None:
    with transaction(engine) as session:
        for generation in (1, 2, 3):
            add(session, "pointer", {"drafter": "chat", "generation": generation})
    first, *rest = pending(engine)
    assert first.payload == {"drafter": "chat", "generation": 1}
    mark_sent(engine, [first.id])
    assert pending(engine) == rest


def test_at_most_the_limit_is_handed_out(engine: Engine) -> None:
    with transaction(engine) as session:
        for _ in range(3):
            add(session, "pointer", {})
    assert len(pending(engine, limit=2)) == 2
