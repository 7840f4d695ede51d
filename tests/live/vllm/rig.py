"""A real vLLM server on this machine's CPU, and redraft's own processes beside it.

The server runs in an environment of its own (`make test-vllm` makes it); everything else in redraft's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any
from urllib.request import urlopen

from openai import OpenAI

from adapter import smollm2
from storage.config import StorageConfig
from storage.records import FeedbackRecord, decode
from storage.redis_clients import consume
from storage.valkey import start_valkey
from tests.test_packages import CHECKOUT

VLLM_PYTHON = os.environ.get("REDRAFT_VLLM", str(CHECKOUT / "build/vllm/bin/python"))
MODEL, DRAFTER, K = "target", "live", 4
MAX_TOKENS, AT_ONCE, CONTEXT = 48, 4, 1024
START_SECONDS = 300.0
SPECULATION = {"method": "custom_class", "model": "service.hosts.vllm.Proposer", "num_speculative_tokens": K}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
LEARNING = {
    "REDRAFT_TEACHER": "rescored",
    "REDRAFT_RESCORE_SHARE": "1.0",
    "REDRAFT_WINDOW_RECORDS": "50",
    "REDRAFT_WINDOW_MINIMUM": "25",
    "REDRAFT_WINDOW_COPIES": "1000",
    "REDRAFT_MINIMUM_REQUESTS": "2",
    "REDRAFT_HOLDBACK": "0",  # every request is the live version's
    "REDRAFT_EPOCHS": "4",
    "REDRAFT_GOVERNOR": "false",  # all of k is proposed, however seldom it is accepted
}


@dataclass(frozen=True)
class Prompt:
    workload: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    id: str
    prompt: Prompt
    prompt_ids: list[int]
    tokens: list[int]
    finish_reason: str
    drafted: list[int]  # by step, as vLLM says
    accepted: list[int]


@dataclass
class Server:
    """vLLM, serving."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def __post_init__(self) -> None:
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def ask(self, prompt: Prompt, **options: Any) -> Answer:
        said = {"return_token_ids": True, "vllm_xargs": {"redraft_workload": prompt.workload}}
        reply = self._client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt.text}],
            **{"max_tokens": MAX_TOKENS, "temperature": 0, "extra_body": said, **options},
        )
        given = reply.model_dump()
        choice, metrics = given["choices"][0], given.get("metrics") or {}
        rounds = metrics.get("speculative_decoding") or {}
        return Answer(
            reply.id, prompt, given["prompt_token_ids"], choice["token_ids"], choice["finish_reason"],
            rounds.get("per_step_drafted") or [], rounds.get("per_step_accepted") or [],
        )  # fmt: skip

    def ask_all(self, prompts: Sequence[Prompt], at_once: int = AT_ONCE, **options: Any) -> list[Answer]:
        """Every answer, in the order of the prompts; raises where a request fails."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **options), prompts))

    def counters(self) -> "Counted":
        """vLLM's own counts of speculation since its start."""
        with urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        found = dict.fromkeys(COUNTERS, 0.0)
        for line in lines:
            for name in COUNTERS:
                if line.startswith(f"vllm:spec_decode_{name}_total{{"):
                    found[name] += float(line.rsplit(" ", 1)[1])
        return Counted(**found)


@dataclass(frozen=True)
class Counted:
    """Of vLLM's /metrics."""

    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0

    def since(self, before: "Counted") -> "Counted":
        return Counted(*(getattr(self, name) - getattr(before, name) for name in COUNTERS))

    @property
    def length(self) -> float:
        """Acceptance length at k."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1.0)


@dataclass
class Stack:
    """redraft beside vLLM: database, Valkey, worker. `environ` is what all of its processes see."""

    home: Path
    environ: dict[str, str]
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def storage(self) -> StorageConfig:
        return StorageConfig(home=self.home)

    def redraft(self, *arguments: str, timeout: float = 600.0) -> str:
        """A command's output; raises where it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            env=self.environ, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, role: str) -> None:
        """One of redraft's own processes."""
        with (self.home / f"{role}.log").open("ab") as log:
            command = [sys.executable, "-m", "cli", role]
            self.children.append(subprocess.Popen(command, env=self.environ, cwd=CHECKOUT, stdout=log, stderr=log))

    def records(self) -> list[FeedbackRecord]:
        """All feedback on the stream."""
        redis = consume(self.storage.stream_url)
        try:
            entries: Any = redis.xrange(f"redraft:{DRAFTER}:feedback")
            return [decode(next(iter(fields.values()))) for _, fields in entries]
        finally:
            redis.close()

    def written(self) -> int:
        """How many records there are."""
        redis = consume(self.storage.stream_url)
        try:
            return int(redis.xlen(f"redraft:{DRAFTER}:feedback"))
        finally:
            redis.close()

    def close(self) -> None:
        for child in reversed(self.children):
            _end(child)


@contextmanager
def stack(home: Path) -> Iterator[Stack]:
    """Valkey, a migrated database, and a drafter of the target's first two layers, version 1."""
    home.mkdir(parents=True, exist_ok=True)
    ours = {key: value for key, value in os.environ.items() if not key.startswith("REDRAFT_")}
    cache = os.environ.get("REDRAFT_CACHE", str(CHECKOUT / "build/cache"))
    environ = {
        **ours, **LEARNING, "REDRAFT_HOME": str(home), "REDRAFT_CACHE": cache, "REDRAFT_DTYPE": "bf16",
        "REDRAFT_LOG": "json", "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    made = Stack(home, environ)
    with start_valkey(made.storage.socket, home / "valkey"):
        try:
            made.redraft("migrate")
            made.redraft("init", DRAFTER, "--layers", "2")
            yield made
        finally:
            made.close()


def target_folder(environ: Mapping[str, str]) -> Path:
    return smollm2.fetch(Path(environ["REDRAFT_CACHE"]))


@contextmanager
def serving(
    stack: Stack,
    name: str,
    speculate: bool,
    dtype: str = "bfloat16",
    speculation: Mapping[str, Any] = SPECULATION,
    more: Sequence[str] = (),
) -> Iterator[Server]:
    """A vLLM server with or without speculation (the proposer's, unless told otherwise), once it answers.

    The whole process group is ended.
    """
    port, log = _free_port(), stack.home / f"{name}.log"
    command = [
        VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target_folder(stack.environ)),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8", *more,
    ]  # fmt: skip
    if speculate:
        command += ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "detailed"]
    seen = {
        **stack.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=seen, stdout=output, stderr=output, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
        yield server
    finally:
        _end(process, group=True)


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.process.poll() is None, f"vLLM ended: read {server.log}\n{tail(server.log)}"
        assert time.monotonic() < deadline, f"vLLM did not answer: read {server.log}\n{tail(server.log)}"
        try:
            with urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes], group: bool = False) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if group:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _free_port() -> int:
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
