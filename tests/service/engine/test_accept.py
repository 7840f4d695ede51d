"""What a round tells beside its tokens: the target's log-probabilities, and what was refused."""

import pytest
import torch

from adapter.policy import Policy
from adapter.target import Target
from service.engine.generation import TokenLogprobs
from tests.service.engine.oracle import GREEDY, Client, ask, first_layers, random_prompt, running

POLICIES = {
    "greedy": GREEDY,
    "sampled": Policy(1.4, top_k=20, repetition_penalty=1.5),
    "seeded": Policy(0.7, logit_bias=((9, 4.0),)),
}


def told(client: Client) -> tuple[list[int], list[TokenLogprobs]]:
    """The tokens and log-probabilities of a request's deltas."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while True:
        delta = client.deltas.get(timeout=60)
        tokens += delta.token_ids
        logprobs += delta.logprobs
        if delta.finish_reason:
            assert delta.finish_reason != "error"
            return tokens, logprobs


@pytest.mark.parametrize("name", POLICIES)
def test_log_probabilities_are_the_targets_own_whatever_the_policy(target: Target, name: str) -> None:
    prompt, policy = random_prompt(target, 1), POLICIES[name]
    with running(target, first_layers(target, layers=2)) as engine:
        seed = 3 if name == "seeded" else None
        others = [ask(engine, random_prompt(target, s), policy=policy, logprobs=s or None) for s in range(3)]
        tokens, found = told(ask(engine, prompt, policy=policy, seed=seed, logprobs=4))
        for client in others:
            client.wait()
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert [f.token for f in found] == tokens
    for row, one in zip(expected, found, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == row.topk(4).indices.tolist()
        assert [p for _, p in one.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_no_alternatives_may_be_asked_for(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        tokens, found = told(ask(engine, random_prompt(target, 1), logprobs=0))
    assert [(f.token, f.top) for f in found] == [(token, ()) for token in tokens]


def test_who_does_not_ask_gets_no_log_probabilities(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        asking = ask(engine, random_prompt(target, 1), logprobs=1)
        assert told(ask(engine, random_prompt(target, 2)))[1] == []
        asking.wait()


def test_a_refused_token_comes_with_the_q_that_it_was_drawn_with(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        sampled = [ask(engine, random_prompt(target, s), policy=Policy(1.0)) for s in range(6)]
        greedy = [ask(engine, random_prompt(target, s)) for s in range(6)]
        drawn = [r.rejected_q for client in sampled for r in client.usage.rounds if r.accepted < r.proposed]
        chosen = [r.rejected_q for client in greedy for r in client.usage.rounds if r.accepted < r.proposed]
    assert min(len(drawn), len(chosen)) > 0
    assert all(0.0 < q < 1.0 for q in drawn)
    assert set(chosen) == {1.0}


def test_plain_decoding_above_temperature_0_leaves_teacher_rows_at_a_part_of_its_positions(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        sampled = ask(engine, random_prompt(target, 1), policy=Policy(1.0), draft_length=0, ignore_eos=True)
        greedy = ask(engine, random_prompt(target, 1), draft_length=0)
        private = ask(engine, random_prompt(target, 1), policy=Policy(1.0), draft_length=0, train=False)
        for client in (sampled, greedy, private):
            client.wait()
    assert [row.position for row in sampled.generation.teacher] == [1, 9, 17]
    assert greedy.generation.teacher == private.generation.teacher == []
