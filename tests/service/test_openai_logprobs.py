"""Log-probabilities over OpenAI's API: the target's own, token by token, in OpenAI's two formats."""

import json
import math
from typing import Any

import pytest
import torch
from openai import OpenAI

from adapter.spelling import Spelling, spelling
from adapter.target import Target
from service.engine.generation import TokenLogprobs
from service.openai_logprobs import CompletionLogprobs, chat_logprobs
from tests.service.asking import CHAT, MODEL, PROMPT, chat, completion, events

TOLERANCE = 1e-3  # fp32 on a target whose logits reach tens: a round of several tokens adds up in another order
POLICIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "top_k": 50},
    "seeded": {"temperature": 1, "seed": 4},
    "penalised": {"presence_penalty": 2, "repetition_penalty": 1.3},
    "structured": {"temperature": 1, "structured_outputs": {"regex": "[a-z ]{16}"}},
}


@pytest.fixture(scope="module")
def spelled(tiny_target: Target) -> Spelling:
    return spelling(tiny_target)


def full_forward(target: Target, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The target's log-probabilities [n, V] before each output token, by one pass without memory."""
    with torch.inference_mode():
        logits: torch.Tensor = target.model(input_ids=torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("draft_length", ["0", "3"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_chats_log_probabilities_are_the_targets_own_whatever_the_policy(
    openai_address: str, tiny_target: Target, policy: dict[str, Any], draft_length: str
) -> None:
    asked = {"max_tokens": 16, "logprobs": True, "top_logprobs": 3, "return_token_ids": True, **policy}
    _, answer = chat(openai_address, {"X-Redraft-Draft-Length": draft_length}, **asked)
    ids = answer["choices"][0]["token_ids"]
    expected = full_forward(tiny_target, answer["prompt_token_ids"], ids)
    for entry, row, token in zip(answer["choices"][0]["logprobs"]["content"], expected, ids, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)
        top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert top == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


def test_a_chats_tokens_are_spelled_in_text_and_bytes(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=16, temperature=0, logprobs=True, top_logprobs=20
    )
    entries = answer.choices[0].logprobs.content or []  # type: ignore[union-attr]
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace")
    assert spelled.removesuffix("<|end|>") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 20
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + TOLERANCE


def test_without_alternatives_only_the_chosen_token_is_reported(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, logprobs=True)
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or []] == [[], []]  # type: ignore[union-attr]


def test_log_probabilities_are_null_unless_asked_for(client: OpenAI, openai_address: str) -> None:
    assert completion(openai_address)[1]["choices"][0]["logprobs"] is None
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, logprobs=False)
    assert answer.choices[0].logprobs is None


def test_a_completions_log_probabilities_are_the_targets_own(client: OpenAI, tiny_target: Target) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=1,
        seed=5,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    found, choice = answer.choices[0].logprobs, answer.choices[0].to_dict()
    assert found is not None
    ids: Any = choice["token_ids"]
    expected = full_forward(tiny_target, tiny_target.tokenizer(PROMPT)["input_ids"], ids)
    own = [float(row[token]) for row, token in zip(expected, ids, strict=True)]
    assert found.token_logprobs == pytest.approx(own, abs=TOLERANCE)
    for row, top, token in zip(expected, found.top_logprobs or [], found.tokens or [], strict=True):
        assert token in top
        assert sorted(top.values(), reverse=True)[:2] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
        assert len(top) in {2, 3}


def test_a_completions_offsets_cut_its_text_into_its_tokens(openai_address: str) -> None:
    _, answer = completion(openai_address, max_tokens=24, logprobs=0)
    choice = answer["choices"][0]
    found = choice["logprobs"]
    ends = [*found["text_offset"][1:], len(choice["text"])]
    for token, begin, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
        if not token.startswith("bytes:") and token != "<|end|>":
            assert choice["text"][begin:end].removeprefix("\ufffd") == token


def test_a_streamed_chat_has_the_log_probabilities_of_the_whole_one(openai_address: str) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 1}
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(openai_address, "/v1/chat/completions", **asked)]
    _, answer = chat(openai_address, max_tokens=12, **asked)
    streamed = [entry for part in parts if part is not None for entry in part["content"]]
    assert rounded(streamed) == rounded(answer["choices"][0]["logprobs"]["content"])


def test_a_streamed_completion_has_the_log_probabilities_of_the_whole_one(openai_address: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "logprobs": 2, "temperature": 1, "seed": 1}
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(openai_address, "/v1/completions", **asked)]
    _, answer = completion(openai_address, max_tokens=12, **asked)
    for key, whole in answer["choices"][0]["logprobs"].items():
        assert rounded([item for part in parts if part is not None for item in part[key]]) == rounded(whole)


def rounded(value: Any) -> Any:
    """The same with every number to three places, as batches round differently."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 3))


def test_a_token_that_is_part_of_a_character_is_written_as_openai_does(target: Target, spelled: Spelling) -> None:
    ids = target.tokenizer("aé!")["input_ids"]
    assert len(ids) == 4
    entries = [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in ids]
    content = chat_logprobs(spelled, entries)["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xc3", "\\xa9", "!"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "aé!"
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [[97], [0xC3], [0xA9], [33]]
    found = CompletionLogprobs().piece(spelled, entries)
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found["text_offset"] == [0, 1, 1, 2]


def test_an_impossible_token_and_one_of_the_padding_can_be_written_as_json(spelled: Spelling) -> None:
    entry = TokenLogprobs(5, -math.inf, ((spelled.known, -math.inf),))
    (written,) = chat_logprobs(spelled, [entry])["content"]
    assert written["logprob"] == -9999.0
    assert written["top_logprobs"] == [{"token": f"token_id:{spelled.known}", "logprob": -9999.0, "bytes": None}]


def test_special_tokens_take_no_room_in_the_text(spelled: Spelling) -> None:
    entries = [TokenLogprobs(token, -1.0, ()) for token in (2, 0, 3)]
    assert CompletionLogprobs().piece(spelled, entries)["text_offset"] == [0, 1, 1]
