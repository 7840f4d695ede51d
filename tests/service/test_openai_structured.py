"""Structured output over OpenAI's API: answers have the form that was asked for, and what cannot be had is refused."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from adapter.target import Target
from service.engine.generation import Generation
from service.origin import Origin
from service.recording import record_of
from tests.service.asking import CHAT, MODEL, PROMPT, completion
from tests.service.serving import call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}


class City(BaseModel):
    name: str = Field(max_length=5)
    size: Literal["small", "large"]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age"]
    assert len(person["name"]) <= 5
    assert 0 <= person["age"] <= 99


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_length", [0, 3])
def test_a_chat_answers_under_a_json_schema(client: OpenAI, temperature: float, draft_length: int) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        temperature=temperature,
        response_format=FORMAT,
        extra_headers={"X-Redraft-Draft-Length": str(draft_length)},
    )
    assert answer.choices[0].finish_reason == "stop"
    check_person(answer.choices[0].message.content or "")


def test_the_official_client_parses_an_answer_into_its_class(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=CHAT, temperature=1, seed=3, response_format=City)
    city = answer.choices[0].message.parsed
    assert city is not None
    assert city.size in {"small", "large"}


def test_a_stream_is_the_whole_structured_answer_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "response_format": FORMAT}
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces) == client.chat.completions.create(**asked).choices[0].message.content
    check_person("".join(pieces))


def test_json_object_mode_begins_a_json_object_and_nothing_else(openai_address: str) -> None:
    _, answer = completion(openai_address, response_format={"type": "json_object"}, max_tokens=8)
    assert answer["choices"][0]["text"].startswith("{")


def test_text_is_free(openai_address: str) -> None:
    _, free = completion(openai_address)
    _, text = completion(openai_address, response_format={"type": "text"})
    assert text["choices"] == free["choices"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["maybe so", "never"]}, "maybe so|never"),
        ({"grammar": 'root ::= "x" digit\ndigit ::= [0-9]'}, "x[0-9]"),
        ({"json": {"enum": [1, "two"]}}, r'\s*(1|"two")\s*'),
        ({"json": json.dumps({"enum": ["three"]})}, r'\s*"three"\s*'),
        (COMPACT, r'\{"name":".*","age":[0-9]+\}'),
    ],
)
def test_vllms_structured_outputs_bind_on_both_routes(
    openai_address: str, path: str, form: dict[str, Any], pattern: str
) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    body = {"model": MODEL, "temperature": 1, "max_tokens": 100, "structured_outputs": form, **prompt}
    status, data = call(openai_address, "POST", path, body)
    assert status == 200
    choice = json.loads(data)["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"] if "chat" in path else choice["text"], re.DOTALL)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"structured_outputs": {"regex": "[0-9"}}, "structured_outputs", "unclosed character class"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs", "missing"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs", "objekt"),
        ({"structured_outputs": {"choice": ["x" * 70_000]}}, "structured_outputs", "65536"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "two words", "schema": {}}}},
            "response_format.json_schema.name",
            "pattern",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_by_name_and_with_the_reason(
    openai_address: str, fields: dict[str, Any], param: str, says: str
) -> None:
    status, answer = completion(openai_address, **fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


def test_a_schema_nested_without_end_is_a_bad_request(openai_address: str) -> None:
    deep = '{"items":' * 3000 + "{}" + "}" * 3000
    body = f'{{"model":"{MODEL}","prompt":"a","structured_outputs":{{"json":{deep}}}}}'
    status, data = call(openai_address, "POST", "/v1/completions", body.encode())
    assert status == 400
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


def test_a_grammar_that_explodes_midway_is_an_error_and_no_half_answer(client: OpenAI, tiny_target: Target) -> None:
    a = tiny_target.tokenizer.convert_tokens_to_ids("a")
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    asked |= {
        "logit_bias": {str(a): 100},
        "extra_body": {"structured_outputs": {"regex": "((a{0,100}){0,100}){0,100}"}},
    }
    with pytest.raises(openai.BadRequestError, match="kept in its grammar"):
        client.completions.create(**asked)
    with pytest.raises(openai.APIError, match="kept in its grammar"):
        list(client.completions.create(**asked, stream=True))
    client.completions.create(model=MODEL, prompt=PROMPT)  # nobody else suffers


def test_an_answer_cut_by_its_limit_is_a_start_of_one(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=3, response_format=FORMAT
    )
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_the_record_of_a_structured_answer_says_so(client: OpenAI, finished: list[Generation]) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, response_format=FORMAT)
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3)
    origin = Origin("target", "tokenizer", "drafter")
    assert [record_of(generation, origin).structured for generation in finished[-2:]] == [True, False]


def test_structured_and_free_requests_share_rounds(openai_address: str) -> None:
    def ask(n: int) -> Any:
        form = {"structured_outputs": COMPACT} if n % 2 else {}
        return completion(openai_address, max_tokens=60, **form)[1]["choices"]

    alone = [ask(0), ask(1)]
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, range(8))) == alone * 4
