"""The parameters that shape and end an output, over OpenAI's API: each reaches the engine, and does what it says."""

from typing import Any

import pytest
from openai import OpenAI

from adapter.policy import Policy
from adapter.target import Target
from service.engine.generation import Generation
from tests.service.asking import CHAT, MODEL, PROMPT, chat, completion

FIELDS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
}


@pytest.fixture(scope="module")
def end(tiny_target: Target) -> int:
    (eos,) = tiny_target.eos_ids
    return eos


def test_every_parameter_of_a_policy_reaches_the_engine(openai_address: str, finished: list[Generation]) -> None:
    for ask in (completion, chat):
        ask(openai_address, **FIELDS, logit_bias={"7": -100, "3": 2.5})
        assert finished[-1].policy == Policy(**FIELDS, logit_bias=((7, -100.0), (3, 2.5)))


def test_parameters_that_are_null_or_left_out_are_off(openai_address: str, finished: list[Generation]) -> None:
    nulls = dict.fromkeys([*FIELDS, "logit_bias", "min_tokens", "stop_token_ids", "response_format", "logprobs"])
    completion(openai_address, **nulls)
    assert finished[-1].policy == Policy()
    assert finished[-1].constraint is None
    assert finished[-1].logprobs is None


def test_a_bias_of_100_makes_a_token_and_one_of_minus_100_bans_it(client: OpenAI, tiny_target: Target) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "temperature": 0}
    token = tiny_target.tokenizer.convert_tokens_to_ids("z")
    made = client.chat.completions.create(**asked, logit_bias={str(token): 100})
    assert made.choices[0].message.content == "z" * 6
    free = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body={"return_token_ids": True})
    said: Any = free.choices[0].to_dict()["token_ids"]
    banned = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        logit_bias={str(token): -100 for token in set(said)},
        extra_body={"return_token_ids": True},
    )
    assert not set(said) & set(banned.choices[0].to_dict()["token_ids"])  # type: ignore[call-overload]


@pytest.mark.parametrize("draft_length", ["0", "3"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_output_has_its_least_length(openai_address: str, end: int, temperature: float, draft_length: str) -> None:
    asked = {"logit_bias": {str(end): 100}, "temperature": temperature, "max_tokens": 20, "return_token_ids": True}
    headers = {"X-Redraft-Draft-Length": draft_length}
    _, short = chat(openai_address, headers, **asked)
    assert short["choices"][0]["token_ids"] == [end]
    _, longer = chat(openai_address, headers, **asked, min_tokens=7)
    ids = longer["choices"][0]["token_ids"]
    assert ids.index(end) == len(ids) - 1 == 7
    assert longer["choices"][0]["finish_reason"] == "stop"


def test_an_ignored_end_of_text_is_a_token_like_others(openai_address: str, end: int) -> None:
    _, answer = completion(openai_address, logit_bias={str(end): 100}, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [end] * 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stop_token_ends_the_text_before_it(openai_address: str, tiny_target: Target) -> None:
    _, free = completion(openai_address, max_tokens=24, return_token_ids=True)
    ids = free["choices"][0]["token_ids"]
    stop = ids[5]
    kept = ids[: ids.index(stop)]
    _, answer = completion(openai_address, max_tokens=24, return_token_ids=True, stop_token_ids=[stop])
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*kept, stop]
    assert choice["text"] == tiny_target.tokenizer.decode(kept, skip_special_tokens=True)
    assert choice["finish_reason"] == "stop"


def test_a_stop_token_does_not_stop_before_the_least_length(openai_address: str) -> None:
    _, free = completion(openai_address, max_tokens=24, return_token_ids=True)
    stop = free["choices"][0]["token_ids"][1]
    _, answer = completion(openai_address, max_tokens=24, return_token_ids=True, stop_token_ids=[stop], min_tokens=10)
    assert stop not in answer["choices"][0]["token_ids"][:10]
