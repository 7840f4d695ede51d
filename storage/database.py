"""The database: opening it, migrating it, and the one place where transactions begin, commit or roll back.

SQLite in the embedded form (several processes and threads write: WAL, writers take their lock at the start
and wait for each other), PostgreSQL in production. Functions of storage run inside `transaction` (may write)
or `reading` (may not), and return plain records.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from storage.schema import Base

if TYPE_CHECKING:
    from alembic.config import Config

BUSY_SECONDS = 10
# A waiting writer gives up before the request that it serves does; nothing here runs for long.
POSTGRES_OPTIONS = (
    "-c lock_timeout=5s -c statement_timeout=30s -c idle_in_transaction_session_timeout=60s -c timezone=UTC"
)
MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
MIGRATION_LOCK = 0x7265647261667401  # see `exclusive`: PostgreSQL knows its locks by number; "redraft", 1


def open_database(url: str) -> Engine:
    """An engine for a SQLAlchemy URL (`sqlite:///path` or `postgresql://...`); makes no tables."""
    parsed = make_url(url)
    return _open_sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _open_postgres(parsed)


def _open_sqlite(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver would begin later than we mean to
    _use_wal(connection)
    for pragma in ("foreign_keys=ON", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _use_wal(connection: Any) -> None:
    """Several that open a new file at once are refused without any waiting (SQLite's busy timeout does not count)."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    """Writers lock at once: upgrading a read lock later fails without waiting when another has written."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _open_postgres(url: URL) -> Engine:
    connect_args = {"options": POSTGRES_OPTIONS, "connect_timeout": 5, "application_name": "redraft"}
    return create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, connect_args=connect_args)


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """A session whose work is committed whole at the end, or not at all when anything raises."""
    with Session(engine.execution_options(writes=True)) as session, session.begin():
        yield session


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session for reading: it waits for no writer, and nothing done in it is kept."""
    with Session(engine) as session:
        yield session


def now(session: Session) -> datetime:
    """The database's clock, in UTC: the same for every host, and moving on within a transaction."""
    if session.get_bind().dialect.name == "sqlite":
        value = session.scalar(text("SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now')"))
        return datetime.fromisoformat(str(value)).replace(tzinfo=UTC)
    moment = session.scalar(text("SELECT clock_timestamp()"))
    assert isinstance(moment, datetime)
    return moment.astimezone(UTC)


def insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`, as both databases do."""
    return sqlite.insert(table) if session.get_bind().dialect.name == "sqlite" else postgresql.insert(table)


def exclusive(session: Session, purpose: int) -> None:
    """Hold out others with the same purpose until the transaction ends. SQLite has one writer anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:purpose)"), {"purpose": purpose})


class NotMigrated(RuntimeError):
    """The database has no tables, or those of another revision."""


def migrate(engine: Engine) -> None:
    """Upgrade to the newest revision, in one transaction; several processes at once take turns."""
    from alembic import command

    config = migration_config()
    with engine.execution_options(writes=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))  # for our turn; tables get less, see env.py
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_migrated(engine: Engine) -> None:
    """Raise `NotMigrated` unless the database is at this checkout's revision."""
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    needed = ScriptDirectory.from_config(migration_config()).get_current_head()
    with engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    if found != needed:
        raise NotMigrated(
            f"the database is at revision {found or 'none (it is empty)'}, this version needs {needed}: "
            "run `redraft migrate`"
        )


def migration_config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
