"""The exchange of servers, with real processes that answer as llama-server does. The real one: `make test-llamacpp`."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import psutil
import pytest

from service.hosts.llamacpp import BlueGreen, LlamaCppConfig
from service.hosts.llamacpp.process import Process, end_leftovers
from service.hosts.swapping import SwapFailed
from storage.registry import Version
from tests.waiting import PATIENCE, until

FAKE = Path(__file__).with_name("fake_server.py")
COMMAND = f"{sys.executable} {FAKE} {{port}} {{drafter}}"
CONFIG = LlamaCppConfig(llamacpp_command=COMMAND, llamacpp_start_seconds=PATIENCE, llamacpp_drain_seconds=PATIENCE)


def version(number: int) -> Version:
    return Version(number, "d", number, None, "0" * 64, 1, datetime.now(UTC), None)


class Proxy:
    """Sends requests where the last flip said, and counts what is unanswered, as the sidecar does."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:9"
        self.flips: list[str] = []
        self._busy: Counter[str] = Counter()
        self._lock = threading.Lock()

    def flip(self, url: str) -> None:
        self.url = url
        self.flips.append(url)

    def busy(self, url: str) -> int:
        return self._busy[url]

    def ask(self, prompt: str = "hello") -> str:
        url = self.url
        self._count(url, 1)
        try:
            answer = httpx2.post(f"{url}/completion", json={"prompt": prompt}, timeout=PATIENCE).json()
            return str(answer["content"])
        finally:
            self._count(url, -1)

    def _count(self, url: str, by: int) -> None:
        with self._lock:
            self._busy[url] += by


@pytest.fixture
def proxy() -> Proxy:
    return Proxy()


@pytest.fixture
def exchange(proxy: Proxy, tmp_path: Path) -> Iterator[BlueGreen]:
    made = BlueGreen("", proxy.flip, proxy.busy, tmp_path / "logs", CONFIG)
    yield made
    made.close()


def drafter(folder: Path, words: str) -> Path:
    path = folder / f"{words.split()[0]}.gguf"
    path.write_text(words)
    return path


def ports(logs: Path) -> int:
    """How many servers there are."""
    return len(list(logs.glob("llama-server.*.json")))


def test_a_new_version_takes_over_and_no_request_fails(exchange: BlueGreen, proxy: Proxy, tmp_path: Path) -> None:
    exchange.swap(version(1), drafter(tmp_path, "one"))
    given: list[str] = []
    stop = threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            given.append(proxy.ask("wait 0.05"))

    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(proxy.ask, "wait 3")
        until(lambda: proxy.busy(proxy.url) > 0)
        asking = [pool.submit(ask_on) for _ in range(2)]
        until(lambda: "one" in given)
        exchange.swap(version(2), drafter(tmp_path, "two"))
        until(lambda: "two" in given or any(a.done() for a in asking))
        stop.set()
        for each in asking:
            each.result()
        assert long.result() == "one"
    assert set(given) == {"one", "two"}
    assert proxy.ask() == "two"
    until(lambda: ports(tmp_path / "logs") == 1)
    assert exchange.version is not None
    assert exchange.version.number == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("broken", "ended with code 1 .*the file is no drafter"),
        ("slow", "not healthy after 1 s"),
        ("plain", "serves without the drafter"),
    ],
)
def test_a_server_that_does_not_serve_is_ended_and_the_old_one_goes_on(
    words: str, why: str, proxy: Proxy, tmp_path: Path
) -> None:
    config = LlamaCppConfig(llamacpp_command=COMMAND, llamacpp_start_seconds=PATIENCE)
    exchange = BlueGreen("", proxy.flip, proxy.busy, tmp_path / "logs", config)
    try:
        exchange.swap(version(1), drafter(tmp_path, "one"))
        exchange._config = LlamaCppConfig(
            llamacpp_command=COMMAND, llamacpp_start_seconds=1 if words == "slow" else PATIENCE
        )
        with pytest.raises(SwapFailed, match=f"version 2 does not serve.*{why}.*Version 1 is served as before"):
            exchange.swap(version(2), drafter(tmp_path, words))
        assert proxy.ask() == "one"
        assert ports(tmp_path / "logs") == 1
    finally:
        exchange.close()


def test_a_drafter_that_is_too_unsure_to_propose_is_served(exchange: BlueGreen, proxy: Proxy, tmp_path: Path) -> None:
    exchange.swap(version(1), drafter(tmp_path, "shy"))
    assert proxy.ask() == "shy"


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_of_this_machine(
    exchange: BlueGreen, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    exchange.swap(version(1), drafter(tmp_path, "one"))
    assert len(proxy.flips) == 1


def test_a_server_that_redraft_did_not_start_is_left_alone(proxy: Proxy, tmp_path: Path) -> None:
    foreign = Process([sys.executable, str(FAKE), "{port}", "{drafter}"], drafter(tmp_path, "theirs"), tmp_path)
    foreign.start()
    foreign.wait_healthy(PATIENCE)
    exchange = BlueGreen(foreign.url, proxy.flip, proxy.busy, tmp_path / "logs", CONFIG)
    try:
        exchange.swap(version(1), drafter(tmp_path, "one"))
        assert proxy.ask() == "one"
        assert foreign.running
    finally:
        exchange.close()
        foreign.stop()


def test_a_version_that_is_served_already_is_not_started_again(
    exchange: BlueGreen, proxy: Proxy, tmp_path: Path
) -> None:
    for _ in range(2):
        exchange.swap(version(1), drafter(tmp_path, "one"))
    assert len(proxy.flips) == 1


def test_a_server_that_ends_by_itself_is_started_again(exchange: BlueGreen, proxy: Proxy, tmp_path: Path) -> None:
    exchange.swap(version(1), drafter(tmp_path, "one"))
    with pytest.raises(httpx2.HTTPError):
        proxy.ask("die")
    until(lambda: len(proxy.flips) == 2)
    assert proxy.ask() == "one"


def test_what_a_killed_parent_left_running_is_ended(tmp_path: Path) -> None:
    left = Process([sys.executable, str(FAKE), "{port}", "{drafter}"], drafter(tmp_path, "one"), tmp_path)
    left.start()
    left.wait_healthy(PATIENCE)
    assert end_leftovers(tmp_path) == 1
    assert not left.running
    assert end_leftovers(tmp_path) == 0


def test_another_process_with_the_same_id_is_not_ended(tmp_path: Path) -> None:
    me = psutil.Process()
    (tmp_path / "llama-server.1.json").write_text(f'{{"pid": {me.pid}, "created": {me.create_time() - 60}}}')
    assert end_leftovers(tmp_path) == 0


@pytest.mark.parametrize("command", ["", "llama-server -m target.gguf", "llama-server --port {port}", 'a "{port}'])
def test_a_command_that_cannot_be_filled_in_is_refused(command: str, proxy: Proxy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="REDRAFT_LLAMACPP_COMMAND"):
        BlueGreen("", proxy.flip, proxy.busy, tmp_path, LlamaCppConfig(command))


def test_a_command_that_is_not_there_leaves_nothing_behind(proxy: Proxy, tmp_path: Path) -> None:
    exchange = BlueGreen("", proxy.flip, proxy.busy, tmp_path, LlamaCppConfig("no-such-server {port} {drafter}"))
    try:
        with pytest.raises(SwapFailed, match=r"no-such-server cannot be started.*Nothing is served"):
            exchange.swap(version(1), drafter(tmp_path, "one"))
    finally:
        exchange.close()
