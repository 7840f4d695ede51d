"""The demo's clients: real prompts through the official `openai` client, several at a time."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from openai import DefaultHttpxClient, OpenAI, OpenAIError


@dataclass(frozen=True)
class Answer:
    """One finished request and its speculative figures."""

    workload: str
    prompt_ids: list[int]
    token_ids: list[int]
    seconds: float
    version: int | None  # of the drafter; None for plain decoding
    proposed: int
    accepted: int
    rounds: int


@dataclass(frozen=True)
class Failure:
    """A request that did not succeed."""

    workload: str
    error: str


class Clients:
    """Sends prompts to one server, `concurrency` at a time."""

    def __init__(self, url: str, max_tokens: int, concurrency: int) -> None:
        self._openai = OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300,
            http_client=DefaultHttpxClient(trust_env=False),  # the server is on this machine
        )  # fmt: skip
        self._model = self._openai.models.list().data[0].id
        self._max_tokens, self._concurrency = max_tokens, concurrency

    def send(
        self,
        workload: str,
        prompts: Sequence[str],
        headers: dict[str, str] | None = None,
        each: Callable[[Answer | Failure], None] = lambda result: None,
    ) -> list[Answer | Failure]:
        """All prompts' results in order; `each` is called as they arrive, from the client's threads."""

        def one(prompt: str) -> Answer | Failure:
            result = self._ask(workload, prompt, headers or {})
            each(result)
            return result

        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(one, prompts))

    def _ask(self, workload: str, prompt: str, headers: dict[str, str]) -> Answer | Failure:
        began = time.perf_counter()
        try:
            reply = self._openai.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=self._max_tokens,
                extra_headers={"X-Redraft-Workload": workload, **headers},
                extra_body={"return_metrics": True, "return_token_ids": True},
            )
        except OpenAIError as error:
            return Failure(workload, str(error))
        return _answer(workload, reply.model_dump(), time.perf_counter() - began)


def _answer(workload: str, reply: dict[str, Any], seconds: float) -> Answer:
    figures = reply["metrics"]["speculative_decoding"]
    return Answer(
        workload=workload,
        prompt_ids=reply["prompt_token_ids"],
        token_ids=reply["choices"][0]["token_ids"],
        seconds=seconds,
        version=figures["drafter_version"],
        proposed=figures["num_draft_tokens"],
        accepted=figures["num_accepted_draft_tokens"],
        rounds=figures["num_spec_steps"],
    )
