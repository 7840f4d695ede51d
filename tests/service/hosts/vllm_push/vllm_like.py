"""A local HTTP server that takes control calls as vLLM does, around two tiny models, and can be made to fail.

The worker's methods are the plugin's own. Linear layers are packed as vLLM's are on CPU: `weight` is empty and only
the kernel's closure knows the matrix. Between start and finish the draft has no memory: a step taken then with
speculation on ends the engine, as it does in vLLM.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import safetensors.torch
import torch
from torch import Tensor, nn

from service.hosts.vllm_plugin import checkpoint
from service.hosts.vllm_plugin.worker import RedraftWorker
from tests.answering import Answering

WIDTH, VOCABULARY = 8, 12


class Packed(nn.Module):
    """A linear layer after vLLM's `process_weights_after_loading` on CPU."""

    def __init__(self, width: int, *sizes: int) -> None:
        super().__init__()
        self.input_size, self.output_partition_sizes = width, list(sizes)
        self.pack(torch.zeros(sum(sizes), width))

    def pack(self, matrix: Tensor) -> None:
        kept = matrix.to(torch.bfloat16)
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
        self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, kept, bias)


class TinyModel(nn.Module):
    """As vLLM builds a model: q, k and v are one matrix; the vocabulary is padded."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY + 4, WIDTH, dtype=torch.bfloat16)
        self.model.embed_tokens.org_vocab_size = VOCABULARY
        self.model.qkv_proj = Packed(WIDTH, 8, 4, 4)
        self.model.norm = nn.LayerNorm(WIDTH, bias=False, dtype=torch.bfloat16)
        self.load_weights(iter(weights(seed).items()))

    @torch.no_grad()
    def load_weights(self, given: Iterator[tuple[str, Tensor]]) -> None:
        tensors = dict(given)
        self.model.embed_tokens.weight[:VOCABULARY] = tensors["model.embed_tokens.weight"]
        self.model.qkv_proj.pack(torch.cat([tensors[f"model.{n}_proj.weight"] for n in "qkv"]))
        self.model.norm.weight.copy_(tensors["model.norm.weight"])


def weights(seed: int) -> dict[str, Tensor]:
    """A checkpoint of a `TinyModel`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.q_proj.weight": (8, WIDTH),
        "model.k_proj.weight": (4, WIDTH), "model.v_proj.weight": (4, WIDTH), "model.norm.weight": (WIDTH,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def write(folder: Path, seed: int) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights(seed), folder / "model.safetensors")
    return folder


class Worker(RedraftWorker):
    def __init__(self, start: Path) -> None:
        self.target, self.draft = TinyModel(seed=100), TinyModel(seed=0)
        self.draft.load_weights(iter(safetensors.torch.load_file(start / "model.safetensors").items()))
        runner = SimpleNamespace(effective_drafter_max_model_len=1024)
        self.model_runner = _Runner(**vars(runner))
        self.parallel_config = SimpleNamespace(world_size=1)
        config = SimpleNamespace(method="draft_model", draft_model_config=SimpleNamespace(model=str(start)))
        self.vllm_config = SimpleNamespace(speculative_config=config)

    def get_model(self) -> nn.Module:
        return self.target

    def get_draft_model(self) -> nn.Module:
        return self.draft

    def reload_weights(self) -> None:
        self.target = TinyModel(seed=100)

    def holds(self, seed: int) -> bool:
        """Whether the draft is this checkpoint, whole."""
        return not checkpoint.differing(weights(seed), self.draft, (), 0)[0]


class _Runner(SimpleNamespace):
    def take_draft_token_ids(self) -> list[int]:
        return [1, 2, 3]


class Refusal(Exception):
    """A 500."""


@dataclass
class VllmLike:
    """`faults`: what is to become of the next calls, by path or worker's method.

    "": nothing; "refuse": it fails; "cut": the connection ends and nothing is done; "lose": it is done, and the answer
    is lost.
    """

    start: Path
    paused: bool = False
    session: bool = False
    homeless: bool = False  # the draft's layers have no memory
    dead: bool = False
    label: str = "default"
    resets: int = 0
    calls: list[str] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)
    on_load: Callable[["VllmLike"], None] = lambda self: None

    def __post_init__(self) -> None:
        self.worker = Worker(self.start)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def restart(self) -> None:
        """As a process manager would do it."""
        self.worker, self.label = Worker(self.start), "default"
        self.paused = self.session = self.homeless = self.dead = False

    @property
    def speculating(self) -> bool:
        return "take_draft_token_ids" not in vars(self.worker.model_runner)

    def step(self) -> None:
        """What happens between any two calls while requests are there."""
        if not self.paused and self.homeless and self.speculating:
            self.dead = True

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.dead:
            raise Refusal("EngineDeadError")
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        waiting = self.faults.get(name, [])
        fault = waiting.pop(0) if waiting else ""
        if fault == "refuse":
            raise Refusal(f"{name} was made to fail")
        if fault == "cut":
            raise ConnectionAbortedError
        said = self._rpc(body) if path == "/collective_rpc" else self._route(path, body)
        self.step()
        if fault == "lose":
            raise ConnectionAbortedError
        return said

    def _rpc(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"results": [getattr(self.worker, body["method"])(*body.get("args", []))]}

    def _route(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/start_draft_weight_update":
            if self.session:
                raise Refusal("start_weight_update called while a weight update is already active")
            self.session = self.homeless = True
        elif path == "/update_weights":
            self._update(body["update_info"])
        elif path == "/finish_weight_update":
            self._need_session()
            self.session = self.homeless = False
            self.label = body["weight_version"]
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/reset_prefix_cache":
            self.resets += 1
            return {"success": True}
        elif path == "/is_paused":
            return {"is_paused": self.paused}
        elif path == "/weight_info":
            return {"weight_version": self.label}
        return {}

    def _update(self, info: dict[str, Any]) -> None:
        self._need_session()
        try:
            if info.get("abandon"):
                raise Refusal("abandoned")
            self.worker.draft.load_weights(iter(checkpoint.read(info["path"], info["sha256"]).items()))
            self.on_load(self)
        except (Refusal, checkpoint.CheckpointRefused) as error:
            self.session = self.homeless = False
            raise Refusal(str(error)) from error

    def _need_session(self) -> None:
        if not self.session:
            raise Refusal("start_weight_update must be called before")


def _handler(engine: VllmLike) -> type[Answering]:
    class Handler(Answering):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self._said(self.body() or {})

        def do_GET(self) -> None:
            self._said({})

        def _said(self, body: dict[str, Any]) -> None:
            try:
                status, said = 200, engine.answer(urlsplit(self.path).path, body)
            except Refusal as error:
                status, said = 500, {"error": {"message": str(error), "code": 500}}
            except ConnectionAbortedError:
                self.close_connection = True
                return
            self.answer(status, said)

    return Handler
