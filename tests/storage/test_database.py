"""Opening databases: whole transactions, writers that wait for each other, the database's own clock."""

import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import IntegrityError

from storage.database import now, open_database, reading, transaction
from storage.outbox import add
from storage.tables import ApiKeyRow, OutboxRow, WindowRecordRow

COUNT_UP = """
import sys
from storage.database import open_database, transaction
from storage.tables import JobRow
engine = open_database(sys.argv[1])
for _ in range(25):
    with transaction(engine) as session:
        session.get_one(JobRow, 1, with_for_update=True).fence += 1
"""


def test_a_transaction_that_raises_keeps_nothing(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        _fail_half_way(engine)
    assert _count(engine) == 0


def test_what_is_done_while_reading_is_not_kept(engine: Engine) -> None:
    with reading(engine) as session:
        add(session, "pointer", {})
        session.flush()
    assert _count(engine) == 0


def test_a_row_that_refers_to_nothing_is_refused(engine: Engine) -> None:
    row = WindowRecordRow(record_id="a", window_id=404, part="training", tenant="t", workload="w")
    with pytest.raises(IntegrityError), transaction(engine) as session:
        session.add(row)


def test_times_come_back_aware_and_in_utc(engine: Engine) -> None:
    noon_in_tokyo = datetime(2026, 5, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=9)))
    with transaction(engine) as session:
        session.add(ApiKeyRow(sha256="a", role="operator", created_at=noon_in_tokyo))
    with reading(engine) as session:
        kept = session.scalars(select(ApiKeyRow.created_at)).one()
    assert kept == noon_in_tokyo
    assert kept.utcoffset() == timedelta(0)


def test_the_clock_is_the_databases_and_in_utc(engine: Engine) -> None:
    with reading(engine) as session:
        assert abs(now(session) - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_clock_moves_on_within_a_transaction(engine: Engine) -> None:
    with transaction(engine) as session:
        first = now(session)
        while now(session) == first:
            pass
        assert now(session) > first


def test_threads_that_write_at_once_all_get_their_turn(engine: Engine) -> None:
    failures: list[Exception] = []

    def write() -> None:
        try:
            for _ in range(20):
                with transaction(engine) as session:
                    session.scalar(select(func.count()).select_from(OutboxRow))  # read first, then write
                    add(session, "pointer", {})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert _count(engine) == 80


def test_processes_that_write_at_once_lose_no_update(database_url: str, engine: Engine) -> None:
    from storage.jobs import Jobs

    job = Jobs(engine).request("adapt", "chat")
    assert job is not None
    command = [sys.executable, "-c", COUNT_UP, database_url]
    writers = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    lease = Jobs(engine).take(job.id, "me", 60)
    assert lease is not None
    assert lease.fence == 3 * 25 + 1


def test_reading_goes_on_while_another_writes(tmp_path: Path, sqlite_template: Path) -> None:
    path = tmp_path / "redraft.db"
    path.write_bytes(sqlite_template.read_bytes())
    engine = open_database(f"sqlite:///{path}")
    with transaction(engine) as writer:
        add(writer, "pointer", {})
        writer.flush()
        assert _count(engine) == 0
    assert _count(engine) == 1
    engine.dispose()


def test_sqlite_is_opened_for_several_processes(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'deep' / 'er' / 'redraft.db'}")
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 10_000}


def test_a_writer_locks_at_the_start_of_its_transaction(tmp_path: Path) -> None:
    path = tmp_path / "redraft.db"
    engine = open_database(f"sqlite:///{path}")
    with transaction(engine) as session:
        now(session)
        other = sqlite3.connect(path, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
    engine.dispose()


def _fail_half_way(engine: Engine) -> None:
    with transaction(engine) as session:
        add(session, "pointer", {})
        session.flush()
        raise RuntimeError("half way")


def _count(engine: Engine) -> int:
    with reading(engine) as session:
        return session.scalars(select(func.count()).select_from(OutboxRow)).one()
