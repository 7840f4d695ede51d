"""The command as a whole: quick to start, and clear about what went wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.children import CHECKOUT
from cli.settings import unknown
from storage.registry import Registry
from tests.cli.conftest import Run
from tests.storage.rows import make_drafter
from tests.waiting import PATIENCE

HEAVY = ("torch", "transformers", "celery", "fastapi")
WITHOUT_HEAVY_IMPORTS = f"""
import sys
from cli.main import app
try:
    app(sys.argv[1:])
finally:
    sys.exit(", ".join(name for name in {HEAVY} if name in sys.modules) or 0)
"""


def run_apart(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that exits with what it should not have imported."""
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "REDRAFT_HOME": str(home)}
    command = [sys.executable, "-c", WITHOUT_HEAVY_IMPORTS, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["init", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], home: Path) -> None:
    done = run_apart(*arguments, home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


@pytest.mark.parametrize("command", ["versions", "history", "servers"])
def test_reading_needs_nothing_heavy(command: str, home: Path, registry: Registry) -> None:
    make_drafter(registry)
    done = run_apart(command, home=home)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_one_line_without_a_traceback(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    result = redraft("show", "9")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: chat has no version 9; it has 1 to 1\n"


def test_an_empty_database_is_answered_with_what_to_run(redraft: Run, home: Path) -> None:
    (home / "redraft.db").unlink()
    result = redraft("versions")
    assert result.exit_code == 1
    assert "run `redraft migrate`" in result.stderr
    assert redraft("migrate").exit_code == 0
    assert "redraft init" in redraft("versions").stderr


def test_a_database_out_of_reach_is_named_without_its_password(redraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/redraft")
    result = redraft("versions")
    assert result.exit_code == 1
    assert "REDRAFT_DATABASE_URL" in result.stderr
    assert "secret" not in result.stderr


def test_a_setting_that_cannot_be_used_is_named_with_its_value(redraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_STREAM_LENGTH", "many")
    result = redraft("versions")
    assert result.exit_code == 1
    assert "REDRAFT_STREAM_LENGTH='many'" in result.stderr


def test_a_misspelt_setting_is_answered_with_the_nearest_one() -> None:
    assert unknown({"REDRAFT_DRAFT_LENGHT": "4", "REDRAFT_HOME": "x", "PATH": "y"}) == [
        "REDRAFT_DRAFT_LENGHT is no setting of redraft; did you mean REDRAFT_DRAFT_LENGTH?"
    ]


def test_a_name_like_no_setting_gets_no_guess() -> None:
    assert unknown({"REDRAFT_QQQQ": "1"}) == ["REDRAFT_QQQQ is no setting of redraft"]
