"""A `redraft serve` of one's own for as long as a measurement lasts, with the settings of this environment."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.children import Child, answers, redraft
from cli.output import CommandError
from cli.serve import listen
from cli.settings import settings
from storage.config import StorageConfig
from storage.valkey import start_valkey

READY_SECONDS = 300.0
STOP_SECONDS = 10.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class OwnServer:
    url: str
    statm: Path  # where Linux tells its memory

    def resident_mb(self) -> float:
        return int(self.statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def own_server() -> Iterator[OwnServer]:
    """The server, ready; with the embedded Valkey where no Redis is set, so that feedback goes where it always does."""
    storage = settings(StorageConfig)
    home = storage.home.absolute()
    (home / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not storage.redis_url:
            stack.enter_context(start_valkey(storage.socket, home / "valkey"))
        port = free_port()
        environ = {**os.environ, "REDRAFT_HOST": HOST, "REDRAFT_PORT": str(port)}
        child = Child("bench", redraft("serve", "--drain", "3"), environ, home / "logs")
        child.start()
        stack.callback(end, child)
        url = f"http://{HOST}:{port}"
        await_answer(child, f"{url}/health/ready", "the server", READY_SECONDS)
        yield OwnServer(url, Path(f"/proc/{child.pid}/statm"))


def free_port() -> int:
    with listen(HOST, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def end(child: Child) -> None:
    child.ask_to_stop()
    child.stop(time.monotonic() + STOP_SECONDS)


def await_answer(child: Child, page: str, what: str, seconds: float) -> None:
    """Wait until GET `page` succeeds; `what` is the child's name in messages."""
    deadline = time.monotonic() + seconds
    while not answers(page):
        if child.exit_code is not None:
            raise CommandError(f"{what} did not start: {child.last_line()} (its log: {child.log})")
        if time.monotonic() > deadline:
            raise CommandError(f"{what} gave no sign of life in {seconds:.0f} s: see {child.log}")
        time.sleep(0.2)
