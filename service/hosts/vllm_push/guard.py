"""Lets an engine go on when the process that paused it dies: nothing else would.

A small process of its own (after_death.py) is started before the pause. When this one ends without a word, that one
turns speculation off (what the draft is by then, nobody knows) and resumes.
"""

import subprocess
import sys
from pathlib import Path
from typing import Self

from service.hosts.vllm_push.after_death import DONE, READY

SCRIPT = Path(__file__).with_name("after_death.py")
LONGEST = 150.0  # seconds that its two calls may take


class GuardFailed(RuntimeError):
    """The guard did not start, so nothing may be paused."""


class Guard:
    """Lives while an engine may be paused: `with Guard(url) as guard: pause; ...; resume; guard.done()`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", "-S", str(SCRIPT), self._url]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != READY:
            self._child.kill()
            raise GuardFailed("the process that would end a pause did not start")
        return self

    def done(self) -> None:
        """The engine runs again, or must not: there is nothing left to guard."""
        assert self._child.stdin is not None
        self._child.stdin.write(DONE + "\n")
        self._child.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(LONGEST)
        self._child.stdout.close()
