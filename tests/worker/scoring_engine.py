"""A small engine over HTTP that scores prompts as vLLM's OpenAI server does, with a real target behind it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import torch

from adapter.target import Target
from tests.answering import Answering


class ScoringEngine:
    """What it is asked, and how it behaves: all may be changed while it runs."""

    def __init__(self, target: Target, most: int = 20) -> None:
        self.target, self.most = target, most  # `most` is vLLM's --max-logprobs
        self.running, self.waiting = 0, 0  # what its metrics say
        self.failures: list[int] = []  # HTTP statuses of the next answers
        self.scores = True  # False: it knows no prompt_logprobs, and answers without
        self.sglang = False  # whether it has SGLang's own route
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def metrics(self) -> str:
        labels = '{engine="0",model_name="tiny"}'
        return (
            "# HELP vllm:num_requests_running Running.\n"
            f"vllm:num_requests_running{labels} {float(self.running)}\n"
            f"vllm:num_requests_waiting{labels} {float(self.waiting)}\n"
            f"vllm:num_requests_waiting_by_reason{labels} 7.0\n"
        )

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """As SGLang's own route does."""
        self.asked.append(body)
        scored = [
            one and [[given["logprob"], int(token), None] for token, given in one.items() if given["rank"] <= k]
            for k in [body["top_logprobs_num"]]
            for one in self._scored(body["input_ids"], k)
        ]
        return 200, {"text": "", "meta_info": {"input_top_logprobs": scored}}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        if self.failures and (status := self.failures.pop(0)) != 200:
            return status, {"error": {"message": "as the test says"}}
        wanted = body.get("prompt_logprobs")
        if wanted is not None and wanted > self.most:
            message = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.most}"
            return 400, {"error": {"message": message}}
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if self.scores and wanted is not None:
            choice["prompt_logprobs"] = self._scored(body["prompt"], wanted)
        return 200, {"choices": [choice]}

    @torch.no_grad()
    def _scored(self, tokens: list[int], top_k: int) -> list[dict[str, Any] | None]:
        logits = self.target.model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for before, token in enumerate(tokens[1:]):
            row = logits[before]
            likeliest = row.topk(top_k)
            own = {str(token): {"logprob": row[token].item(), "rank": int((row > row[token]).sum()) + 1}}
            ranked = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            found.append({**own, **{str(t): {"logprob": p, "rank": n} for n, (t, p) in enumerate(ranked, 1)}})
        return found


@contextmanager
def scoring_engine(target: Target) -> Iterator[ScoringEngine]:
    engine = ScoringEngine(target)

    class Handler(Answering):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, engine.metrics().encode())
            else:
                self.answer(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = self.body()
            if self.path == "/generate" and not engine.sglang:
                status, answer = 404, {"detail": "Not Found"}
            else:
                status, answer = engine.generate(body) if self.path == "/generate" else engine.complete(body)
            self.answer(status, answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
