"""Migrations: up, down and up again with rows present, the same tables as the code's, and clear refusals."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from storage.database import NotMigrated, check_migrated, migrate, migration_config, open_database
from storage.registry import Registry
from storage.tables import DrafterRow
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter


@pytest.fixture
def empty_engine(empty_database_url: str) -> Iterator[Engine]:
    opened = open_database(empty_database_url)
    yield opened
    opened.dispose()


def test_an_empty_database_is_refused_with_the_command_to_run(empty_engine: Engine) -> None:
    with pytest.raises(NotMigrated, match=r"it is empty.*run `redraft migrate`"):
        check_migrated(empty_engine)


def test_a_database_behind_is_refused_with_both_revisions(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    with pytest.raises(NotMigrated, match=r"revision 0000, this version needs 00"):
        check_migrated(engine)


def test_a_migrated_database_is_accepted(empty_engine: Engine) -> None:
    migrate(empty_engine)
    check_migrated(empty_engine)


def test_migrating_twice_changes_nothing(engine: Engine) -> None:
    make_drafter(Registry(engine))
    migrate(engine)
    assert [d.name for d in Registry(engine).drafters()] == ["chat"]


def test_two_processes_that_migrate_at_once_take_turns(empty_database_url: str) -> None:
    failures: list[Exception] = []
    together = threading.Barrier(6)

    def run() -> None:
        opened = open_database(empty_database_url)
        try:
            together.wait()
            migrate(opened)
            check_migrated(opened)
        except Exception as error:
            failures.append(error)
        finally:
            opened.dispose()

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_migration_that_fails_leaves_no_table(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE TABLE window_record (in_the_way INTEGER)"))
    with pytest.raises(Exception, match="already exists"):
        migrate(empty_engine)
    assert inspect(empty_engine).get_table_names() == ["window_record"]


def test_tables_of_the_migrations_are_those_of_the_code(engine: Engine) -> None:
    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        difference = compare_metadata(MigrationContext.configure(connection, opts=options), DrafterRow.metadata)
    assert difference == []


def test_checks_of_the_migrations_are_those_of_the_code(engine: Engine) -> None:
    found = inspect(engine)
    names = {c["name"] for table in found.get_table_names() for c in found.get_check_constraints(table)}
    tables = DrafterRow.metadata.tables.values()
    wanted = {c.name for table in tables for c in table.constraints if str(c.name).startswith("ck_")}
    assert names == wanted != set()


def test_down_and_up_again_with_rows_present(engine: Engine, tmp_path: Path) -> None:
    registry = Registry(engine)
    first = make_drafter(registry)
    second = make_candidate(registry, WeightsStore(tmp_path / "weights"), first, "a")
    registry.promote(second, first, "test", "up and down")
    _downgrade(engine)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    migrate(engine)
    assert make_drafter(registry).number == 1


def _downgrade(engine: Engine) -> None:
    config = migration_config()
    with engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
