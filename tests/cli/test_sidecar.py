"""`redraft sidecar` as a process of its own, and its benchmark, before our own server."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.children import child_environ, redraft
from cli.main import app
from tests.service.hosts.sidecar.rig import Script, served
from tests.service.serving import call
from tests.waiting import PATIENCE, until


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def _sidecar(engine: str, home: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = _free_port()
    environ = {**os.environ, "REDRAFT_HOME": str(home), "REDRAFT_SIDECAR_PORT": str(port)}
    command = redraft("sidecar", engine, *options)
    process = subprocess.Popen(command, env=child_environ(environ), stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None
        try:
            return call(address, "GET", "/redraft/health")[0] == 200
        except OSError:
            return False

    try:
        until(up)
        yield address, process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def test_the_command_passes_requests_without_a_drafter_and_ends_in_order(home: Path) -> None:
    with served(Script(pieces=[b'{"data":[]}'])) as engine, _sidecar(engine, home) as (address, process):
        assert call(address, "GET", "/v1/models") == (200, b'{"data":[]}')
        told = json.loads(call(address, "GET", "/redraft/health")[1])
        assert (told["drafter"], told["observing"], told["url"]) == (None, False, engine)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://h:1/?a=b"])
def test_an_address_that_is_none_is_refused(redraft: Callable[..., Any], url: str) -> None:
    result = redraft("sidecar", url)
    assert result.exit_code == 1
    assert "no engine's address" in result.stderr


def test_a_port_that_is_taken_is_named_with_its_setting(
    redraft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("REDRAFT_SIDECAR_PORT", str(taken.getsockname()[1]))
        result = redraft("sidecar", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "REDRAFT_SIDECAR_PORT" in result.stderr


def test_the_benchmark_says_when_there_is_no_engine(redraft: Callable[..., Any]) -> None:
    result = redraft("bench", "sidecar", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "start one first" in result.stderr


def test_the_command_is_one_of_redraft_s() -> None:
    assert "sidecar" in {command.callback.__name__ for command in app.registered_commands if command.callback}
