"""A real Valkey for tests: `valkey` is shared by the session and emptied for each test; `own_valkey` belongs to
one test, which may freeze, kill and start it again.
"""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from storage.redis_clients import admin
from storage.valkey import Valkey, start_valkey
from tests.lossy_proxy import LossyProxy

PATIENCE = "socket_connect_timeout=30&socket_timeout=30"


@dataclass
class ValkeyServer:
    """A server in a short-named folder of its own (socket paths are limited), with the faults tests cause."""

    folder: Path
    patient: bool = False
    server: Valkey = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    @property
    def url(self) -> str:
        """A patient server's clients wait longer than their profiles say: on a busy machine 200 ms are soon over, and
        what is sent again then is there twice."""
        return f"{self.server.url}&{PATIENCE}" if self.patient else self.server.url

    def client(self) -> redis.Redis:
        return admin(self.url)

    def start(self) -> None:
        self.server = start_valkey(self.folder / "v.sock", self.folder / "data")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self.server.process is not None
        self.server.process.wait()

    def kill_synced(self) -> None:
        """Once all that it has confirmed is on disk: it is synced each second, and what is younger may be lost."""
        with self.client() as client:
            client.set("synced", "until here")
            assert client.execute_command("WAITAOF", 1, 0, 10_000)[0] == 1
        self.kill()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self.server.running():
            self.thaw()
        self.server.close()
        shutil.rmtree(self.folder)

    def _signal(self, number: int) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(number)


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    server = ValkeyServer(Path(tempfile.mkdtemp(prefix="rdk")), patient=True)
    yield server
    server.close()


@pytest.fixture
def valkey(shared_valkey: ValkeyServer) -> ValkeyServer:
    """The session's server, empty."""
    with shared_valkey.client() as client:
        client.flushall()
    return shared_valkey


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server that this test may break."""
    server = ValkeyServer(Path(tempfile.mkdtemp(prefix="rdk")))
    yield server
    server.close()


@pytest.fixture
def lossy(valkey: ValkeyServer) -> Iterator[LossyProxy]:
    """A way to the session's server on which replies can get lost."""
    with tempfile.TemporaryDirectory(prefix="rdk") as folder:
        proxy = LossyProxy(Path(folder) / "p.sock", valkey.server.socket)
        yield proxy
        proxy.close()
