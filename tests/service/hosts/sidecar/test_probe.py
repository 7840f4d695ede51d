"""What an engine is found to tell, and what is said of what it does not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.dialects import CHAT, COMPLETIONS, FORMS, Form
from service.hosts.sidecar.engine_client import EngineClient
from service.hosts.sidecar.probe import NoEngine, probe
from tests.service.hosts.sidecar.rig import Asgi, Rig, body_of, served


def test_our_own_server_tells_everything_in_every_form(rig: Rig) -> None:
    assert rig.findings is not None
    assert rig.findings.engine == "redraft"
    assert set(rig.findings.plans) == set(FORMS)
    for plan in rig.findings.plans.values():
        assert (plan.token_ids, plan.steps, plan.totals, plan.top_k) == (True, True, True, 20)
    assert rig.findings.missing == ()


def engine_of(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Asgi:
    """An engine whose answers a function makes, of the path and the body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, told = answer(scope["path"], json.loads(await body_of(receive) or b"{}"))
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    return app


def _models(owner: str) -> dict[str, Any]:
    return {"data": [{"id": "m", "owned_by": owner, "root": "/nowhere"}, {"id": "lora", "parent": "m"}]}


def _found(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Any:
    with served(engine_of(answer)) as address:
        client = EngineClient(lambda: address)
        try:
            return probe(client, SidecarConfig())
        finally:
            client.close()


def _completion(body: dict[str, Any], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "four", "logprobs": None, "finish_reason": "length", "token_ids": None}
    if body.get("return_token_ids"):
        choice |= {"token_ids": [4], "prompt_token_ids": [1]}
    return {"id": "x", "choices": [choice], **extra}


def test_an_engine_that_refuses_the_additions_is_not_observed_and_the_reason_is_said() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, _models("vllm")
        return (400, {}) if "return_token_ids" in body or body.get("stream") else (200, _completion(body))

    found = _found(answer)
    assert not found.plans
    assert any("refuses return_token_ids" in sentence for sentence in found.missing)
    assert any("drafters get no feedback" in sentence for sentence in found.missing)


def test_fewer_log_probabilities_are_asked_for_where_the_engine_gives_fewer() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, _models("vllm")
        if path == CHAT or body.get("stream") or (body.get("logprobs") or 0) > 5:
            return 400, {}
        told = _completion(body)
        if body.get("logprobs"):
            top = {f"token_id:{i}": -1.0 - i for i in range(5)}
            told["choices"][0]["logprobs"] = {"tokens": ["token_id:0"], "token_logprobs": [-1.0], "top_logprobs": [top]}
        return 200, told

    found = _found(answer)
    assert found.plans[Form(COMPLETIONS, False)].top_k == 5
    assert any("--per-request-spec-decode-metrics detailed" in sentence for sentence in found.missing)
    assert any("/v1/chat/completions: the engine answers 400" in sentence for sentence in found.missing)


def test_additions_that_leave_a_trace_are_not_made() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, _models("vllm")
        if path == CHAT or body.get("stream"):
            return 400, {}
        return 200, _completion(body, **({"observed": True} if body.get("return_token_ids") else {}))

    found = _found(answer)
    assert not found.plans
    assert any("cannot be taken out without a trace" in sentence for sentence in found.missing)


def test_an_unknown_engine_passes_and_is_not_observed() -> None:
    found = _found(lambda path, body: (200, _models("somebody")))
    assert not found.plans
    assert "nothing is observed" in found.missing[0]


def test_what_is_no_openai_server_is_said_so() -> None:
    with pytest.raises(NoEngine, match="OpenAI-compatible"):
        _found(lambda path, body: (404, {}))
