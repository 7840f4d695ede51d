"""OpenAI's API, asked by the official client over a real socket: the text is the target's own."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from adapter.target import Target
from service.engine.engine import Engine
from service.engine.generation import Generation
from tests.service.asking import CHAT, MODEL, PROMPT, completion
from tests.service.conftest import VERSION
from tests.service.engine.oracle import plain_greedy


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
def test_a_prompt_may_be_token_ids(openai_address: str, tiny_target: Target, wrapped: bool) -> None:
    ids = tiny_target.tokenizer(PROMPT)["input_ids"]
    _, by_ids = completion(openai_address, prompt=[ids] if wrapped else ids)
    _, by_text = completion(openai_address, prompt=[PROMPT] if wrapped else PROMPT)
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


def test_top_k_of_one_is_greedy(openai_address: str) -> None:
    _, greedy = completion(openai_address)
    _, narrow = completion(openai_address, temperature=1.0, top_k=1)
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


def test_figures_and_token_ids_are_left_out_unless_asked_for(openai_address: str) -> None:
    _, answer = completion(openai_address)
    assert "metrics" not in answer
    assert not {"token_ids", "prompt_token_ids"} & set(answer["choices"][0])


def test_a_draft_length_of_zero_decodes_plainly_to_the_same_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(
        **asked, extra_headers={"X-Redraft-Draft-Length": "0"}, extra_body={"return_metrics": True}
    )
    figures = plain.to_dict()["metrics"]["speculative_decoding"]
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


def test_the_model_is_listed_and_found_by_name(client: OpenAI, decoder: Engine) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == decoder.context
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
