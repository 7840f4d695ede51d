"""llama.cpp's `Swapper`: a second llama-server with the new drafter takes over from the first.

start it -> healthy -> it answers and speculates -> new requests go to it -> the old one ends when its last request is
answered. Where any of this fails before the switch, the new one is ended and the old one goes on as before. For that
while two copies of the target are in memory (on a CPU they share the file's pages; a GPU needs room for both).
"""

import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from service.hosts.llamacpp.process import Process, ServerFailed, end_leftovers
from service.hosts.swapping import SwapFailed
from storage.config import setting
from storage.registry import Version

QUIET_SECONDS = 1.0  # a request may have been given the old address a moment ago
POLL_SECONDS = 0.2
TEND_SECONDS = 1.0
LONGEST_PAUSE = 60.0

log = structlog.get_logger()


@dataclass(frozen=True)
class LlamaCppConfig:
    """How llama-server is started and exchanged."""

    llamacpp_command: str = setting("", "command that starts llama-server; {port} and {drafter} are filled in")
    llamacpp_target: str = setting("", "GGUF file that it serves as the target; drafters get its tokenizer, not ours")
    llamacpp_start_seconds: float = setting(300.0, "how long a new llama-server may take until it answers")
    llamacpp_drain_seconds: float = setting(900.0, "how long the old one may finish its requests before it is ended")


@dataclass(frozen=True)
class Serving:
    """A server and what it serves."""

    version: Version
    checkpoint: Path
    process: Process


class BlueGreen:
    """Serves each version by a llama-server of its own. `close` ends what it started."""

    def __init__(
        self,
        url: str,
        flip: Callable[[str], None],
        busy: Callable[[str], int],
        folder: Path,
        config: LlamaCppConfig = LlamaCppConfig(),
    ) -> None:
        """`url`: who serves until the first swap ("": nobody); it is not ended, as redraft did not start it.

        `flip(url)` sends new requests there, `busy(url)` tells how many are unanswered there; logs go to `folder`.
        Raises `ValueError` where the command cannot be one.
        """
        self._command = _checked(config.llamacpp_command)
        self._url, self._flip, self._busy = url, flip, busy
        self._folder, self._config = folder, config
        self._serving: Serving | None = None
        self._exchanging = threading.Lock()
        self._draining: threading.Thread | None = None
        self._closing = threading.Event()
        if left := end_leftovers(folder):
            log.warning("llamacpp.leftovers_ended", servers=left)
        self._tending = threading.Thread(target=self._tend, name="llamacpp", daemon=True)
        self._tending.start()

    @property
    def version(self) -> Version | None:
        """What is served by a server of ours."""
        return self._serving.version if self._serving else None

    def swap(self, version: Version, checkpoint: Path) -> None:
        """Serve `version` from the GGUF file `checkpoint`. Raises `SwapFailed`; the one before then goes on."""
        with self._exchanging:
            current = self._serving
            if current is not None and current.version.id == version.id and current.process.running:
                return
            self._wait_drained()  # never three copies of the target
            self._take_over(Serving(version, checkpoint, self._started(version, checkpoint)))

    def close(self) -> None:
        """End all servers of ours, whatever they are at."""
        self._closing.set()
        self._tending.join()
        self._wait_drained()
        if self._serving is not None:
            self._serving.process.stop()

    def _started(self, version: Version, checkpoint: Path) -> Process:
        """A server that answers and speculates; it is gone again where it does not."""
        process = Process(self._command, checkpoint, self._folder)
        try:
            process.start()
            process.wait_healthy(self._config.llamacpp_start_seconds)
            process.check_speculation()
        except ServerFailed as failed:
            process.stop()
            raise SwapFailed(
                f"a llama-server with version {version.number} does not serve: {failed}. {self._meanwhile()}. Correct "
                f"REDRAFT_LLAMACPP_COMMAND or what its log says, or `redraft rollback`"
            ) from failed
        except BaseException:
            process.stop()
            raise
        return process

    def _meanwhile(self) -> str:
        if self._serving is not None:
            return f"Version {self._serving.version.number} is served as before"
        return f"{self._url} serves as before" if self._url else "Nothing is served"

    def _take_over(self, green: Serving) -> None:
        """Send new requests to `green`, and end the one before when its own are answered."""
        blue, self._serving = self._serving, green
        self._flip(green.process.url)
        log.info("llamacpp.took_over", version=green.version.number, url=green.process.url)
        if blue is None:
            if self._url:
                log.info("llamacpp.left_running", url=self._url, reason="redraft did not start it")
            return
        self._draining = threading.Thread(target=self._drain, args=(blue,), name="llamacpp-drain", daemon=True)
        self._draining.start()

    def _drain(self, blue: Serving) -> None:
        deadline = time.monotonic() + self._config.llamacpp_drain_seconds
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_SECONDS and not self._closing.is_set():
            unanswered = self._busy(blue.process.url)
            if unanswered:
                quiet_since = time.monotonic()
            if time.monotonic() > deadline:
                log.warning("llamacpp.drain_cut", version=blue.version.number, unanswered=unanswered)
                break
            time.sleep(POLL_SECONDS)
        blue.process.stop()
        log.info("llamacpp.ended", version=blue.version.number)

    def _wait_drained(self) -> None:
        if self._draining is not None:
            self._draining.join()
            self._draining = None

    def _tend(self) -> None:
        """Start the serving server again where it ended by itself, with growing pauses."""
        pause = TEND_SECONDS
        while not self._closing.wait(pause):
            with self._exchanging:
                pause = TEND_SECONDS if self._revived() else min(2 * pause, LONGEST_PAUSE)

    def _revived(self) -> bool:
        """False where it had ended and cannot be started."""
        ended = self._serving
        if ended is None or ended.process.running:
            return True
        log.warning("llamacpp.ended_by_itself", version=ended.version.number, words=ended.process.last_words())
        ended.process.stop()
        try:
            process = self._started(ended.version, ended.checkpoint)
        except SwapFailed as failed:
            log.warning("llamacpp.not_started_again", reason=str(failed))
            return False
        self._serving = Serving(ended.version, ended.checkpoint, process)
        self._flip(process.url)
        log.info("llamacpp.started_again", version=ended.version.number)
        return True


def _checked(command: str) -> list[str]:
    """The command as words."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"REDRAFT_LLAMACPP_COMMAND cannot be read: {error}") from error
    missing = [name for name in ("{port}", "{drafter}") if not any(name in word for word in words)]
    if missing:
        raise ValueError(
            f"REDRAFT_LLAMACPP_COMMAND lacks {' and '.join(missing)}: give a command such as `llama-server -m "
            f"target.gguf --spec-type draft-simple --spec-draft-model {{drafter}} --port {{port}} --metrics`"
        )
    return words
