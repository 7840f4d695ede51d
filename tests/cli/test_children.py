"""Child processes: restarted with a growing pause, left alone after too many deaths, never orphaned."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import children
from cli.children import CHECKOUT, Child, redraft
from storage.valkey import answers
from tests.waiting import PATIENCE, until

PARENT = """
import os, sys, time
from pathlib import Path
from cli.children import Child, redraft
child = Child("valkey", redraft("valkey"), os.environ, Path(sys.argv[1]))
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A home whose socket has a short name, as in a user's folder."""
    with tempfile.TemporaryDirectory(prefix="rdk") as folder:
        yield Path(folder)


@pytest.fixture
def environ(short_home: Path) -> dict[str, str]:
    return {**os.environ, "REDRAFT_HOME": str(short_home)}


def running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_that_dies_is_said_to_and_started_again(environ: dict[str, str], short_home: Path) -> None:
    child = Child("valkey", redraft("valkey"), environ, short_home)
    child.start()
    until(lambda: answers(short_home / "valkey.sock"))
    first = child.pid
    os.kill(first or 0, signal.SIGTERM)
    until(lambda: child.exit_code is not None)
    line = child.tend()
    assert line is not None
    assert "restarting it in 0.5 s" in line
    assert child.tend() is None
    until(lambda: child.tend() is None and child.pid != first)
    until(lambda: answers(short_home / "valkey.sock"))
    child.ask_to_stop()
    assert child.stop(time.monotonic() + PATIENCE)
    assert not answers(short_home / "valkey.sock")


def test_after_too_many_deaths_in_a_row_it_is_left_as_it_is(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "PAUSES", (0.0, 0.01))
    child, said = Child("bad", redraft("no-such-command"), environ, tmp_path), list[str]()
    child.start()
    until(lambda: bool((line := child.tend()) and said.append(line)) or child.given_up)
    assert len(said) == 3
    assert "restarted 2 times" in said[-1]
    assert child.tend() is None
    assert "no-such-command" in (tmp_path / "bad.log").read_text()


def test_what_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    child = Child("stubborn", [sys.executable, "-c", ignoring], os.environ, tmp_path)
    child.start()
    until(lambda: "up" in child.log.read_text())
    child.ask_to_stop()
    assert not child.stop(time.monotonic() + 0.2)
    assert child.exit_code == -signal.SIGKILL


def test_a_child_ends_with_a_parent_that_was_killed(environ: dict[str, str], short_home: Path) -> None:
    environ = {**environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", PARENT, str(short_home)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: answers(short_home / "valkey.sock"))
        parent.kill()
    until(lambda: not running(pid))
    assert not answers(short_home / "valkey.sock")


def test_a_large_log_is_put_aside_at_the_next_start(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LOG_BYTES", 10)
    (tmp_path / "help.log").write_text("what was logged before")
    child = Child("help", redraft("--help"), environ, tmp_path)
    child.start()
    until(lambda: child.exit_code is not None)
    child.stop(time.monotonic() + PATIENCE)
    assert (tmp_path / "help.log.1").read_text() == "what was logged before"
    assert "Usage" in (tmp_path / "help.log").read_text()
