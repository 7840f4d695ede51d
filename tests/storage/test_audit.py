"""The audit log: a whole chain is accepted, any change of it is found."""

import threading

import pytest
from sqlalchemy import Engine, delete, select, update

from storage import audit
from storage.database import reading, transaction
from storage.registry import Registry
from storage.tables import AuditRow
from tests.storage.rows import make_drafter


@pytest.fixture
def ids(engine: Engine) -> list[int]:
    """Three rows in the log."""
    for number in range(3):
        with transaction(engine) as session:
            audit.append(session, "me", "test", "drafter/chat", {"n": number}, {"n": number + 1}, "why")
    with reading(engine) as session:
        return list(session.scalars(select(AuditRow.id).order_by(AuditRow.id)))


def test_a_whole_chain_is_accepted(engine: Engine, ids: list[int]) -> None:
    assert len(ids) == 3
    assert audit.verify(engine) is None


def test_an_empty_log_is_whole(engine: Engine) -> None:
    assert audit.verify(engine) is None


@pytest.mark.parametrize("column", ["actor", "action", "subject", "reason", "after", "hash"])
def test_an_edited_row_is_found(engine: Engine, ids: list[int], column: str) -> None:
    value: object = {"n": 99} if column == "after" else "somebody else"
    with transaction(engine) as session:
        session.execute(update(AuditRow).where(AuditRow.id == ids[1]).values({column: value}))
    assert audit.verify(engine) == ids[1]


def test_a_removed_row_is_found_at_the_one_after_it(engine: Engine, ids: list[int]) -> None:
    with transaction(engine) as session:
        session.execute(delete(AuditRow).where(AuditRow.id == ids[1]))
    assert audit.verify(engine) == ids[2]


def test_rows_appended_at_once_make_one_chain(engine: Engine) -> None:
    registry = Registry(engine)
    threads = [threading.Thread(target=make_drafter, args=(registry, f"d{n}")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.drafters()) == 4
    assert audit.verify(engine) is None
