"""A child process of `redraft up`: started with its log file, restarted with a growing pause, never orphaned.

A child's stdin is a pipe that only its parent holds: when the parent dies, however it dies, the pipe ends and
the child stops itself (`follow_parent`). Children have a session of their own, so that Ctrl-C reaches the
parent alone, which stops them in order.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from cli.nearby import ask_nearby

CHECKOUT = Path(__file__).resolve().parent.parent
SUPERVISED = "SUPERVISED_BY_REDRAFT"  # set for children, which follow their parent's end
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each restart in a row
STEADY_SECONDS = 60.0  # a child that ran for so long starts anew with the shortest pause
LOG_BYTES = 10_000_000  # a log larger than this is put aside at the next start
ORPHAN_SECONDS = 8.0  # for an orderly end without a parent; then the process ends as it is


def redraft(*arguments: str) -> list[str]:
    """The command line of a redraft command under this interpreter."""
    return [sys.executable, "-m", "cli", *arguments]


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: this checkout's packages first, output unbuffered."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH", "")]))
    return {**environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", SUPERVISED: "1"}


def answers(url: str) -> bool:
    """Whether GET `url` succeeds."""
    try:
        with ask_nearby(url, timeout=2) as response:
            return bool(response.status == HTTPStatus.OK)
    except OSError:
        return False


class Child:
    """One process that should run: `tend` it now and then."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._command = command
        self._environ = child_environ(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._restarts = 0
        self.given_up = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or where it was never started."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start the process, its output appended to the log."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self._restart_at = None

    def tend(self) -> str | None:
        """Restart the process when it has ended and its pause is over; a line where there is something to say."""
        if self.given_up or self.exit_code is None:
            return None
        moment = time.monotonic()
        if self._restart_at is None:
            return self._plan_restart(moment)
        if moment >= self._restart_at:
            self._restarts += 1
            self.start()
        return None

    def _plan_restart(self, moment: float) -> str:
        if moment - self._started_at > STEADY_SECONDS:
            self._restarts = 0
        ended = f"{self.name} ended with code {self.exit_code} (see {self.log})"
        if self._restarts >= len(PAUSES):
            self.given_up = True
            return f"{ended}; it was restarted {self._restarts} times in a row, so it is left as it is"
        pause = PAUSES[self._restarts]
        self._restart_at = moment + pause
        return f"{ended}; restarting it in {pause:g} s"

    def ask_to_stop(self) -> None:
        if self._process is not None and self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, deadline: float) -> bool:
        """Wait until `deadline` (monotonic) and kill what is left; True where it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.01))
            orderly = True
        except subprocess.TimeoutExpired:
            orderly = False
        # Also what the process itself started and left: the group is the child's own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        return orderly

    def last_line(self) -> str:
        """The last line of the log that says something: why it ended, most of the time."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it logged nothing"


def follow_parent() -> None:
    """In a supervised process: stop when the parent is gone."""
    if os.environ.get(SUPERVISED):
        threading.Thread(target=_stop_at_end_of_input, name="parent", daemon=True).start()


def _stop_at_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
