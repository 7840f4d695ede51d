"""Streams, as they stand on the wire and as the official client reads them; and clients that leave."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI

from adapter.target import Target
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Generation
from tests.service.asking import CHAT, MODEL, PROMPT, events, openai_app
from tests.service.engine.oracle import plain_greedy
from tests.service.serving import running, slowed
from tests.waiting import until


def test_a_streamed_chat_has_openais_chunks(openai_address: str) -> None:
    chunks = events(openai_address, "/v1/chat/completions", messages=CHAT)
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
def test_the_usage_of_a_stream_comes_last_in_a_chunk_without_choices(openai_address: str, path: str) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    chunks = events(openai_address, path, **prompt, stream_options={"include_usage": True}, return_metrics=True)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_token_ids_of_a_stream_are_those_of_the_whole_answer(openai_address: str, tiny_target: Target) -> None:
    chunks = events(openai_address, "/v1/completions", prompt=PROMPT, return_token_ids=True)
    pieces = [chunk["choices"][0] for chunk in chunks[:-1]]
    ids = tiny_target.tokenizer(PROMPT)["input_ids"]
    assert [token for piece in pieces for token in piece["token_ids"]] == plain_greedy(tiny_target, ids, 12)
    assert [piece.get("prompt_token_ids") for piece in pieces] == [ids] + [None] * (len(pieces) - 1)


LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 230, "temperature": 0}


@contextmanager
def slow_server(target: Target, finished: list[Generation]) -> Iterator[tuple[str, Engine]]:
    """A server of its own, which decodes plainly in one slot; stopped at the end unless the test did so."""
    engine = Engine(target, EngineConfig(draft_length=0, slots=1, context=256), finished.append)
    engine.start()
    with slowed(target), running(openai_app(target, engine)) as address:
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


def stop_once_running(engine: Engine) -> None:
    until(lambda: engine.running == 1)
    engine.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_says_so_to_whoever_waits(tiny_target: Target, stream: bool) -> None:
    with slow_server(tiny_target, []) as (address, engine):
        stopper = threading.Thread(target=stop_once_running, args=(engine,))
        stopper.start()
        client = OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        with client, pytest.raises(openai.APIError, match="the server is stopping"):
            list(client.completions.create(**LONG, stream=stream))
        stopper.join()
