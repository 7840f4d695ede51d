"""What redraft's parts inside an engine's own process share: whose they are, and looking for the drafter.

Nothing there may wait for a database or a file: a thread does, and the engine serves on without a drafter meanwhile.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from storage.registry import UnknownDrafter
from storage.validation import LONGEST_LABEL

LOOK_SECONDS: Final = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class InsideConfig:
    """Settings of redraft's own server that mean the same in an engine; the README has them all."""

    drafter: str = ""
    cache: Path = Path("~/.cache/redraft")


class Looking:
    """Calls `attach` until it does not raise: no database yet, no drafter, files on their way."""

    def __init__(self, attach: Callable[[], None], **meanwhile: str) -> None:
        """`meanwhile`: what the engine does without a drafter, for the log."""
        self._attach, self._meanwhile = attach, meanwhile
        self.told = ""  # why there is no drafter
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redraft-attach", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._attach()
                return
            except Exception as error:  # the engine serves on: it is looked for again
                self._tell(error)
            self._closing.wait(LOOK_SECONDS)

    def _tell(self, error: Exception) -> None:
        """Once for each reason."""
        kind = type(error).__name__
        reason = str(error) if isinstance(error, ValueError | UnknownDrafter) else kind
        if reason != self.told:
            log.warning("drafter.none", reason=reason, error=kind, **self._meanwhile)
        self.told = reason


def server_id(host: str) -> str:
    """This process among all servers."""
    return f"{socket.gethostname()}:{host}-{os.getpid()}"


def sender(said: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Workload, tenant, and whether it may be trained on, as a request's own parameters for plugins say."""
    train = str(said.get("redraft_train", "yes")).lower() not in ("no", "false", "0")
    return _label(said.get("redraft_workload")), _label(said.get("redraft_tenant")), train


def _label(said: object) -> str:
    """A workload or tenant as records take it."""
    label = str(said) if said is not None else ""
    return label if 0 < len(label) <= LONGEST_LABEL and label.isprintable() else "default"
