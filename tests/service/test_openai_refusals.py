"""What is not served is refused, in OpenAI's form and by name: never ignored, never half done."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from adapter.target import Target
from service.engine.engine import Engine, EngineConfig
from tests.service.asking import CHAT, MODEL, PROMPT, completion, openai_app
from tests.service.serving import call, running


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0.5"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("n", 2),
        ("n", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", True),
        ("suffix", "tail"),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stop_token_ids", [100000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(65))),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("guided_json", {}),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", ["one", "two"]),
        ("prompt", [1, 10**6]),
        ("prompt", [-1]),
        ("prompt", None),
    ],
)
def test_what_is_not_served_is_refused_by_name(openai_address: str, field: str, value: Any) -> None:
    status, answer = completion(openai_address, **{field: value})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"].split(".")[0] == field
    assert field in answer["error"]["message"] or field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("best_of", 1),
        ("echo", False),
        ("skip_special_tokens", True),
        ("tools", []),
        ("user", "someone"),
        ("top_k", -1),
        ("temperature", None),
    ],
)
def test_neutral_values_of_what_is_not_served_are_taken(openai_address: str, field: str, value: Any) -> None:
    status, _ = completion(openai_address, **{field: value})
    assert status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2, "stop": "x"},
        {"min_tokens": 2, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_what_does_not_go_together_is_refused_and_both_are_named(openai_address: str, fields: dict[str, Any]) -> None:
    status, answer = completion(openai_address, **fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert all(field in answer["error"]["message"] for field in fields)


def test_alternatives_without_log_probabilities_are_refused_as_at_openai(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs is only allowed when logprobs is true"):
        client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, top_logprobs=2)


def test_an_unknown_model_is_not_found_and_the_served_one_is_named(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'{MODEL}'") as refused:
        client.chat.completions.create(model="gpt-0", messages=CHAT)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("limit", [None, 200])
def test_a_request_over_the_context_is_refused_with_the_figures(client: OpenAI, limit: int | None) -> None:
    words = "a b " * (20 if limit else 200)
    with pytest.raises(openai.BadRequestError, match="256 tokens") as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": words}] * 3, max_tokens=limit)
    assert refused.value.code == "context_length_exceeded"


def test_messages_that_the_template_refuses_are_a_bad_request(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "oracle", "content": "?"}]
    with pytest.raises(openai.BadRequestError, match="unknown role oracle") as refused:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert refused.value.param == "messages"


def test_a_picture_is_refused(openai_address: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    status, data = call(openai_address, "POST", "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["param"].startswith("messages.0.content")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"null"])
def test_a_body_that_is_no_json_object_is_a_bad_request(openai_address: str, body: bytes) -> None:
    status, data = call(openai_address, "POST", "/v1/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


def test_a_body_that_does_not_say_it_is_json_is_refused(openai_address: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    status, _ = call(openai_address, "POST", "/v1/completions", body, {"Content-Type": "text/plain"})
    assert status == 400


def test_a_refusal_does_not_repeat_the_prompt(openai_address: str) -> None:
    _, answer = completion(openai_address, prompt={"secret words": 1})
    assert "secret" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Redraft-Workload", "two words"),
        ("X-Redraft-Tenant", "x" * 65),
        ("X-Redraft-Train", "maybe"),
        ("X-Redraft-Draft-Length", "4"),
        ("X-Redraft-Draft-Length", "-1"),
    ],
)
def test_a_header_that_cannot_be_used_is_refused_by_name(client: OpenAI, name: str, value: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_headers={name: value})
    assert refused.value.param == name.lower()


def test_a_full_server_says_when_to_come_back(tiny_target: Target) -> None:
    engine = Engine(tiny_target, EngineConfig(draft_length=0, slots=1, waiting=0), lambda generation: None)
    with running(openai_app(tiny_target, engine)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        with client, pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt=PROMPT)
    assert refused.value.response.headers["Retry-After"] == "1"
