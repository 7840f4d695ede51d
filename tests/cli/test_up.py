"""`redraft up` on a tiny target: ready, answering, reviewed, healed, stopped; and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from cli.children import CHECKOUT
from tests.cli.test_children import running
from tests.waiting import PATIENCE, until

STOP_SECONDS = 45.0  # 10 s is the promise; a busy test machine needs more


class House:
    """One `redraft up` in a process of its own, and commands about it."""

    def __init__(self, home: Path, target: Path) -> None:
        self.port = free_port()
        self.output = home / "up.out"
        given = {name: value for name, value in os.environ.items() if not name.startswith("REDRAFT_")}
        self.environ = {
            **given,
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
            "REDRAFT_HOME": str(home),
            "REDRAFT_TARGET": str(target),
            "REDRAFT_CACHE": str(target / "cache"),
            "REDRAFT_PORT": str(self.port),
            "REDRAFT_FOLD_SECONDS": "0.5",
            "REDRAFT_GOVERNOR": "false",
        }
        with self.output.open("wb") as output:
            command = [sys.executable, "-m", "cli", "up", "--layers", "1"]
            self.process = subprocess.Popen(command, env=self.environ, stdout=output, stderr=output)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def redraft(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=PATIENCE)

    def json(self, *arguments: str) -> Any:
        done = self.redraft(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, as long as the house stands."""
        until(lambda: self.process.poll() is not None or condition(), lambda: self.said + self.logs(), 300)
        assert self.process.poll() is None, self.said + self.logs()

    def logs(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.output.parent.glob("logs/*.log"))

    def descendants(self) -> list[int]:
        """The processes under this house, Valkey's server too."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split()]
        return found[1:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def house(target_dir: Path) -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="rdk") as folder:
        house = House(Path(folder), target_dir)
        try:
            house.wait(lambda: "redraft is ready" in house.said)
            yield house
        finally:
            if house.process.poll() is None:
                house.process.send_signal(signal.SIGINT)
                house.process.wait(PATIENCE)


def test_the_line_when_ready_has_the_address_and_an_example(house: House) -> None:
    assert f"http://127.0.0.1:{house.port}/v1" in house.said
    assert f"curl http://127.0.0.1:{house.port}/v1/chat/completions" in house.said


def test_the_operator_is_told_where_the_key_is(house: House) -> None:
    key = house.output.parent / "operator.key"
    assert str(key) in (house.output.parent / "logs" / "serve.log").read_text()
    assert key.stat().st_mode & 0o777 == 0o600


def test_an_openai_client_is_answered_and_its_request_is_in_the_history(house: House) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{house.port}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Hello, world!"}],
        max_tokens=16,
        temperature=0,
        extra_headers={"X-Redraft-Workload": "greetings"},
    )
    client.close()
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    house.wait(lambda: [row["workload"] for row in house.json("history")["rows"]] == ["greetings"])


def test_versions_are_listed_and_the_doctor_finds_nothing(house: House) -> None:
    (version,) = house.json("versions")
    assert (version["number"], version["state"]) == (1, "live")
    house.wait(lambda: {found["state"] for found in house.json("doctor")} == {"ok"})


def test_a_second_one_in_the_same_home_is_refused(house: House) -> None:
    done = house.redraft("up")
    assert done.returncode == 1
    assert "running in" in done.stderr
    assert house.process.poll() is None


def test_a_part_that_dies_is_started_again(house: House) -> None:
    def housekeepers() -> set[str]:
        return {server["id"] for server in house.json("servers") if server["host_kind"] == "housekeeper"}

    house.wait(lambda: len(housekeepers()) == 1)
    (before,) = housekeepers()
    os.kill(int(before.split(":")[-1]), signal.SIGKILL)
    house.wait(lambda: "housekeeper ended with code -9" in house.said)
    house.wait(lambda: bool(housekeepers() - {before}))


def test_ctrl_c_stops_all_and_leaves_nothing(house: House) -> None:
    pids = house.descendants()
    assert len(pids) >= 6  # valkey and its server, serve, trainer, housekeeper, beat
    began = time.monotonic()
    house.process.send_signal(signal.SIGINT)
    assert house.process.wait(PATIENCE) == 0
    assert time.monotonic() - began < STOP_SECONDS
    assert [pid for pid in pids if running(pid)] == []
    assert not (house.output.parent / "valkey.sock").exists()
    assert "all state is kept" in house.said
