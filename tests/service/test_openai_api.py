"""OpenAI's API, asked by the official client over a real socket."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI

from adapter.target import Target
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Generation
from service.openai_api import Served, openai_router
from service.openai_errors import install
from tests.service.conftest import VERSION
from tests.service.engine.oracle import plain_greedy
from tests.service.serving import call, running, until

MODEL = "tiny"
PROMPT = "the drafter proposes"
CHAT: list[Any] = [{"role": "user", "content": "Hello, world!"}]


def app(target: Target, engine: Engine) -> FastAPI:
    app = FastAPI()
    install(app)
    app.include_router(openai_router(Served(target, engine, MODEL)))
    return app


@pytest.fixture(scope="module")
def address(tiny_target: Target, decoder: Engine) -> Iterator[str]:
    with running(app(tiny_target, decoder)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def completion(address: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    status, data = call(address, "POST", "/v1/completions", body)
    return status, json.loads(data)


def events(address: str, path: str, **fields: Any) -> list[Any]:
    """The events of a stream, as they stand on the wire."""
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "stream": True, **fields}
    status, data = call(address, "POST", path, body)
    assert status == 200
    parts = data.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


# The text is the target's.


def test_a_completion_is_the_targets_own_greedy_text(client: OpenAI, tiny_target: Target) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    ids = tiny_target.tokenizer(PROMPT)["input_ids"]
    expected = plain_greedy(tiny_target, ids, 24)
    assert answer.choices[0].text == tiny_target.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected))
    assert answer.usage.total_tokens == len(ids) + len(expected)
    assert answer.object == "text_completion"


def test_a_chat_answers_the_templated_messages(client: OpenAI, tiny_target: Target) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = tiny_target.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert answer.to_dict()["prompt_token_ids"] == ids
    assert answer.choices[0].to_dict()["token_ids"] == plain_greedy(tiny_target, ids, 16)
    assert answer.choices[0].message.role == "assistant"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)


def test_an_answer_can_be_sent_back_as_a_message(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4)
    again = [
        *CHAT,
        first.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
    ]
    second = client.chat.completions.create(model=MODEL, messages=again, max_tokens=4)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_prompt_may_be_token_ids(address: str, tiny_target: Target, wrapped: bool) -> None:
    ids = tiny_target.tokenizer(PROMPT)["input_ids"]
    _, by_ids = completion(address, prompt=[ids] if wrapped else ids)
    _, by_text = completion(address, prompt=[PROMPT] if wrapped else PROMPT)
    assert by_ids["choices"] == by_text["choices"]


def test_a_seed_repeats_a_sampled_answer(client: OpenAI) -> None:
    def texts(seed: int) -> set[str]:
        answers = [
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1.0, top_p=0.9, seed=seed)
            for _ in range(2)
        ]
        return {answer.choices[0].text for answer in answers}

    assert len(texts(1)) == 1
    assert texts(1) != texts(2)


def test_top_k_of_one_is_greedy(address: str) -> None:
    _, greedy = completion(address)
    _, narrow = completion(address, temperature=1.0, top_k=1)
    assert narrow["choices"] == greedy["choices"]


def test_a_completion_without_a_limit_is_of_16_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_chat_without_a_limit_ends_with_the_context(client: OpenAI, decoder: Engine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == decoder.context or answer.choices[0].finish_reason == "stop"


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    stop = whole[5:7]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop, "never said"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


# Streams.


def test_a_streamed_chat_has_openais_chunks(address: str) -> None:
    chunks = events(address, "/v1/chat/completions", messages=CHAT)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 0}
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces) == client.chat.completions.create(**asked).choices[0].message.content


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(c.text for c in chunks) == client.completions.create(**asked).choices[0].text
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_usage_of_a_stream_comes_last_in_a_chunk_without_choices(address: str, path: str) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    chunks = events(address, path, **prompt, stream_options={"include_usage": True}, return_metrics=True)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_token_ids_of_a_stream_are_those_of_the_whole_answer(address: str, tiny_target: Target) -> None:
    chunks = events(address, "/v1/completions", prompt=PROMPT, return_token_ids=True)
    pieces = [chunk["choices"][0] for chunk in chunks[:-1]]
    ids = tiny_target.tokenizer(PROMPT)["input_ids"]
    assert [token for piece in pieces for token in piece["token_ids"]] == plain_greedy(tiny_target, ids, 12)
    assert [piece.get("prompt_token_ids") for piece in pieces] == [ids] + [None] * (len(pieces) - 1)


# Speculative figures and labels.


def test_the_figures_of_a_request_agree_with_its_rounds(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"return_metrics": True}
    )
    f = answer.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert len(f["acceptance_histogram"]) == f["num_spec_tokens"] + 1 == 4
    assert sum(f["acceptance_histogram"]) == f["num_spec_steps"] == len(f["per_step_accepted"]) > 0
    assert sum(n * count for n, count in enumerate(f["acceptance_histogram"])) == f["num_accepted_draft_tokens"]
    assert sum(f["per_step_accepted"]) == f["num_accepted_draft_tokens"]
    assert sum(f["per_step_drafted"]) == f["num_draft_tokens"]
    assert f["mean_acceptance_length"] == 1 + f["num_accepted_draft_tokens"] / f["num_spec_steps"]
    assert f["draft_acceptance_rate"] == f["num_accepted_draft_tokens"] / f["num_draft_tokens"]
    assert f["drafter_version"] == VERSION


def test_figures_and_token_ids_are_left_out_unless_asked_for(address: str) -> None:
    _, answer = completion(address)
    assert "metrics" not in answer
    assert not {"token_ids", "prompt_token_ids"} & set(answer["choices"][0])


def test_a_draft_length_of_zero_decodes_plainly_to_the_same_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(
        **asked, extra_headers={"X-Redraft-Draft-Length": "0"}, extra_body={"return_metrics": True}
    )
    figures = plain.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert (figures["num_spec_steps"], figures["acceptance_histogram"]) == (0, [0])
    assert figures["drafter_version"] is None
    assert plain.choices[0].text == client.completions.create(**asked).choices[0].text


def test_the_headers_label_the_generation(client: OpenAI, finished: list[Generation]) -> None:
    headers = {"X-Redraft-Workload": "sql", "X-Redraft-Tenant": "acme-1", "X-Redraft-Train": "no"}
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, extra_headers=headers)
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert [(g.workload, g.tenant, g.train) for g in finished[-2:]] == [
        ("sql", "acme-1", False),
        ("default", "default", True),
    ]


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


# Refusals.


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
        ("logprobs", 0),
        ("logprobs", 5),
        ("echo", True),
        ("suffix", "tail"),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("response_format", {"type": "json_object"}),
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
def test_what_is_not_served_is_refused_by_name(address: str, field: str, value: Any) -> None:
    status, answer = completion(address, **{field: value})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == field
    assert field in answer["error"]["message"] or field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", None),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("user", "someone"),
        ("top_k", -1),
        ("temperature", None),
    ],
)
def test_neutral_values_of_what_is_not_served_are_taken(address: str, field: str, value: Any) -> None:
    status, _ = completion(address, **{field: value})
    assert status == 200


def test_log_probabilities_may_be_declined_but_not_asked_for(client: OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, logprobs=False)
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, logprobs=True)


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
    with pytest.raises(openai.BadRequestError, match="unknown role oracle") as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "oracle", "content": "?"}])  # type: ignore[list-item]
    assert refused.value.param == "messages"


def test_a_picture_is_refused(address: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    status, data = call(address, "POST", "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["param"].startswith("messages.0.content")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"null"])
def test_a_body_that_is_no_json_object_is_a_bad_request(address: str, body: bytes) -> None:
    status, data = call(address, "POST", "/v1/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


def test_a_body_that_does_not_say_it_is_json_is_refused(address: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    status, _ = call(address, "POST", "/v1/completions", body, {"Content-Type": "text/plain"})
    assert status == 400


def test_a_refusal_does_not_repeat_the_prompt(address: str) -> None:
    _, answer = completion(address, prompt={"secret words": 1})
    assert "secret" not in json.dumps(answer)


def test_the_model_is_listed_and_found_by_name(client: OpenAI, decoder: Engine) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == decoder.context
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# Clients that leave, servers that are full or stop.


LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 230, "temperature": 0}


@contextmanager
def slow_server(target: Target, finished: list[Generation]) -> Iterator[tuple[str, Engine]]:
    """A server of its own, which decodes plainly in one slot; stopped at the end unless the test did so."""
    engine = Engine(target, EngineConfig(draft_length=0, slots=1, context=256), finished.append)
    engine.start()
    with running(app(target, engine)) as address:
        yield address, engine
    engine.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(tiny_target: Target, stream: bool) -> None:
    finished: list[Generation] = []
    with slow_server(tiny_target, finished) as (address, engine):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        body = json.dumps({**LONG, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: engine.running == 1)
        connection.close()
        until(lambda: len(finished) == 1)
        assert engine.running == 0
    assert finished[0].finish_reason == "cancelled"
    assert len(finished[0].output_ids) < LONG["max_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_says_so_to_whoever_waits(tiny_target: Target, stream: bool) -> None:
    with slow_server(tiny_target, []) as (address, engine):
        stopper = threading.Thread(target=lambda: (until(lambda: engine.running == 1), engine.stop()))
        stopper.start()
        client = OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        with client, pytest.raises(openai.APIError, match="the server is stopping"):
            list(client.completions.create(**LONG, stream=stream))
        stopper.join()


def test_a_full_server_says_when_to_come_back(tiny_target: Target) -> None:
    engine = Engine(tiny_target, EngineConfig(draft_length=0, slots=1, waiting=0), lambda generation: None)
    with running(app(tiny_target, engine)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        with client, pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt=PROMPT)
    assert refused.value.response.headers["Retry-After"] == "1"
