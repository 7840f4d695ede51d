"""The `redraft` command in this process, in a home folder of its own with a migrated SQLite database."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from cli.main import app
from storage.config import PREFIX
from storage.database import open_database
from storage.registry import Registry
from storage.weights import WeightsStore

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Commands set up logging for their process; here the next test follows in the same one."""
    root, names = logging.getLogger(), list(logging.root.manager.loggerDict)
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    structlog.reset_defaults()


@pytest.fixture
def home(tmp_path: Path, sqlite_template: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder that the environment names; all other settings have their defaults."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(sqlite_template, folder / "redraft.db")
    monkeypatch.setenv("REDRAFT_HOME", str(folder))
    return folder


@pytest.fixture
def database(home: Path) -> Iterator[Engine]:
    opened = open_database(f"sqlite:///{home / 'redraft.db'}")
    yield opened
    opened.dispose()


@pytest.fixture
def registry(database: Engine) -> Registry:
    return Registry(database)


@pytest.fixture
def store(home: Path) -> WeightsStore:
    return WeightsStore(home / "weights")


@pytest.fixture
def redraft(home: Path) -> Run:
    """Runs a command line; the result has `exit_code`, `stdout` and `stderr`."""
    runner = CliRunner()

    def run(*arguments: str) -> Result:
        result = runner.invoke(app, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run
