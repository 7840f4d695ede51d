"""SGLang's control routes over a tiny draft model, with the real loader behind them. What the real ones are called and
take is held against SGLang's wheel by `make test-contracts`.
"""

import base64
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from service.hosts.sglang_plugin import loader
from tests.answering import Answering

EMPTY_PICKLES = (b"\x80\x04]\x94.", b"\x80\x04].")


class Model:
    """What `load_weights` is called on."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {"a": torch.zeros(2), "b": torch.zeros(2)}
        self.fail_after = 10  # tensors

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for count, (name, tensor) in enumerate(tensors):
            if count >= self.fail_after:
                raise RuntimeError("out of memory")
            if name not in self.weights:
                raise KeyError(name)
            self.weights[name] = tensor


class FakeSglang:
    """The engine. `calls` are the paths asked for, in order."""

    def __init__(self) -> None:
        self.draft, self.target = Model(), Model()
        self.calls: list[str] = []
        self.paused = self.open = False
        self.touch_target = False
        self.refuse = ""  # a path that answers with an error
        self.version = ""
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(path)
        if path == self.refuse:
            return {"success": False, "message": "not now"}
        match path:
            case "/server_info":
                return {"tp_size": 1}
            case "/weights_checker":
                assert body["action"] == "checksum"
                model = {"draft": self.draft, "target": self.target}[body["selector"]]
                return {"success": True, "ranks": [{"per_gpu_checksum": checksum(model)}]}
            case "/pause_generation":
                assert body == {"mode": "retract"}
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/begin_weight_update":
                assert body == {"selector": "draft"}
                if self.open:
                    return {"success": False, "message": "a weight-update session is already open"}
                self.open = True
            case "/update_weights_from_tensor":
                self.load(body)
            case "/end_weight_update":
                if not self.open:
                    return {"success": False, "message": "no weight-update session is open"}
                self.open = False
            case "/flush_cache":
                assert self.paused
            case _:
                raise AssertionError(path)
        return {"success": True}

    def load(self, body: dict[str, Any]) -> None:
        assert self.open
        assert self.paused
        assert body["selector"] == "draft"
        assert body["load_format"] == loader.LOADER
        assert [base64.b64decode(one) in EMPTY_PICKLES for one in body["serialized_named_tensors"]] == [True]
        self.version = body["weight_version"]
        loader.load_from_pointer(self.draft, [])
        if self.touch_target:
            self.target.weights["a"] = torch.ones(2)


def checksum(model: Model) -> str:
    total = sha256()
    for name in sorted(model.weights):
        total.update(model.weights[name].numpy().tobytes())
    return total.hexdigest()


@contextmanager
def served(engine: FakeSglang) -> Iterator[str]:
    """Over HTTP."""

    class Handler(Answering):
        def do_GET(self) -> None:
            self._said({})

        def do_POST(self) -> None:
            self._said(self.body() or {})

        def _said(self, body: dict[str, Any]) -> None:
            said = engine.answer(self.path, body)
            self.answer(200 if said.get("success", True) else 400, said)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def install_context(rank: int = 0) -> None:
    """`sglang.srt.runtime_context`, as far as the plugin asks it."""
    for name in ("sglang", "sglang.srt"):
        sys.modules.setdefault(name, ModuleType(name))
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_rank=rank)  # type: ignore[attr-defined]
    sys.modules["sglang.srt.runtime_context"] = context
