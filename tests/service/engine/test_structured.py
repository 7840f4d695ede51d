"""Structured output through the engine: under the schema whatever the policy, and the same with and without drafts."""

import json
from typing import Any

import pytest
import torch

from adapter.policy import Policy
from adapter.spelling import Spelling, spelling
from adapter.structured import MinimumLength, constrain, json_grammar
from adapter.target import Target
from tests.service.engine.oracle import GREEDY, Client, ask, first_layers, random_prompt, running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "deep": {"const": {"ok": True}},
    },
    "required": ["name", "tags", "age", "deep"],
    "additionalProperties": False,
}
GRAMMAR = json_grammar(SCHEMA, compact=True)
PROMPTS = 6
POLICIES = {
    "greedy": (GREEDY, False),
    "penalised": (Policy(temperature=0.0, repetition_penalty=1.3, frequency_penalty=1.0), False),
    "seeded": (Policy(temperature=1.0, top_p=0.95), True),
    "sampled": (Policy(temperature=1.2), False),
}


@pytest.fixture(scope="module")
def spelled(target: Target) -> Spelling:
    return spelling(target)


def outputs(
    target: Target,
    spelled: Spelling,
    policy: Policy,
    seeded: bool,
    draft_length: int,
    vocabulary: int | None = None,
    nodes: int = 0,
) -> list[Client]:
    """Some prompts decoded together under the schema."""
    config = {"draft_length": draft_length, "context": 256, "tree_nodes": nodes}
    with running(target, first_layers(target, 2, vocabulary), **config) as engine:
        clients = [
            ask(
                engine,
                random_prompt(target, n),
                200,
                policy,
                seed=n if seeded else None,
                constraint=constrain(spelled, GRAMMAR),
            )
            for n in range(PROMPTS)
        ]
        for client in clients:
            client.wait()
    return clients


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "tags", "age", "deep"]
    assert len(value["name"]) <= 8
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green", "blue"}
    assert 0 <= value["age"] <= 120
    assert value["deep"] == {"ok": True}


@pytest.mark.parametrize(("draft_length", "nodes"), [(0, 0), (4, 0), (4, 12)], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize(("policy", "seeded"), POLICIES.values(), ids=POLICIES)
def test_the_text_is_json_under_the_schema(
    target: Target, spelled: Spelling, policy: Policy, seeded: bool, draft_length: int, nodes: int
) -> None:
    for client in outputs(target, spelled, policy, seeded, draft_length, nodes=nodes):
        check(client.text)
        assert client.last is not None
        assert client.last.finish_reason == "stop"


@pytest.mark.parametrize(("vocabulary", "nodes"), [(None, 0), (100, 0), (None, 12)], ids=["whole", "reduced", "tree"])
@pytest.mark.parametrize("name", ["greedy", "penalised", "seeded"])
def test_drafts_leave_a_structured_output_as_it_is(
    target: Target, spelled: Spelling, name: str, vocabulary: int | None, nodes: int
) -> None:
    plain = outputs(target, spelled, *POLICIES[name], draft_length=0)
    drafted = outputs(target, spelled, *POLICIES[name], draft_length=4, vocabulary=vocabulary, nodes=nodes)
    assert [client.tokens for client in drafted] == [client.tokens for client in plain]
    assert sum(len(client.usage.rounds) for client in drafted) > 0
    assert sum(r.accepted for client in drafted for r in client.usage.rounds) > 0


def test_a_structured_output_is_the_likeliest_allowed_token_at_each_position(target: Target, spelled: Spelling) -> None:
    """Held against full forwards and a mask, without memory, rounds or drafts."""
    (client, *_) = outputs(target, spelled, GREEDY, False, draft_length=4)
    constraint, output = constrain(spelled, GRAMMAR), list[int]()
    with torch.inference_mode():
        while not output or output[-1] not in target.eos_ids:
            logits = target.model(input_ids=torch.tensor([client.generation.prompt_ids + output])).logits[0, -1]
            output.append(int(logits.masked_fill(~constraint.allowed([]), float("-inf")).argmax()))
            constraint.commit(output[-1:])
    assert client.tokens == output


@pytest.mark.parametrize("draft_length", [0, 4])
def test_an_output_does_not_end_before_its_least_length(target: Target, draft_length: int) -> None:
    (end,) = target.eos_ids
    policy = Policy(temperature=0.0, logit_bias=((end, 100.0),))
    with running(target, first_layers(target, 2), draft_length=draft_length) as engine:
        least = MinimumLength(7, target.eos_ids, target.vocab_size)
        assert len(ask(engine, random_prompt(target, 1), 24, policy, constraint=least).wait()) == 8
