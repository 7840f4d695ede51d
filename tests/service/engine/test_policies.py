"""Requests that have one answer, greedy with penalties and seeded, get it: however they are decoded."""

import pytest

from adapter.policy import Policy
from adapter.target import Target
from tests.service.engine.oracle import GREEDY, ask, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.plain import plain

PENALISED = {
    "repetition": Policy(0.0, repetition_penalty=1.4),
    "presence": Policy(0.0, presence_penalty=1.5),
    "frequency": Policy(0.0, frequency_penalty=1.5),
    "negative": Policy(0.0, frequency_penalty=-0.5, presence_penalty=-0.5, repetition_penalty=0.8),
    "bias": Policy(0.0, logit_bias=((9, 6.0), (40, -100.0), (200, 4.0))),
    "all": Policy(0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.4, logit_bias=((9, 3.0),)),
}
SEEDED = {
    "temperature": Policy(0.9),
    "top_p": Policy(1.2, top_p=0.9),
    "top_k_and_min_p": Policy(1.5, top_k=30, min_p=0.02),
    "penalties": Policy(0.9, repetition_penalty=1.3, frequency_penalty=0.6, logit_bias=((9, 2.0),)),
}


@pytest.mark.parametrize("policy", PENALISED.values(), ids=PENALISED)
def test_greedy_with_penalties_equals_plain_greedy_with_penalties(target: Target, policy: Policy) -> None:
    prompts = [random_prompt(target, seed) for seed in range(4)]
    with running(target, first_layers(target, layers=2)) as engine:
        clients = [ask(engine, prompt, policy=policy) for prompt in prompts]
        outputs = [client.wait() for client in clients]
    assert outputs == [plain(target, prompt, policy, 24) for prompt in prompts]
    assert outputs != [plain_greedy(target, prompt, 24) for prompt in prompts]


def test_a_reduced_draft_vocabulary_changes_no_penalised_token(target: Target) -> None:
    with running(target, first_layers(target, layers=2, vocabulary=100)) as engine:
        for policy in PENALISED.values():
            prompt = random_prompt(target, 1)
            assert ask(engine, prompt, policy=policy).wait() == plain(target, prompt, policy, 24)


@pytest.mark.parametrize("k", range(7))
def test_a_seeded_request_gives_the_same_tokens_at_any_draft_length(target: Target, k: int) -> None:
    prompt = random_prompt(target, 3)
    with running(target, first_layers(target, layers=2), draft_length=6) as engine:
        clients = [ask(engine, prompt, policy=policy, seed=7, draft_length=k) for policy in SEEDED.values()]
        assert [c.wait() for c in clients] == [plain(target, prompt, p, 24, seed=7) for p in SEEDED.values()]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [None, 100], ids=["whole", "reduced"])
def test_a_seeded_request_gives_the_same_tokens_with_any_drafter(
    target: Target, layers: int, vocabulary: int | None
) -> None:
    with running(target, first_layers(target, layers, vocabulary)) as engine:
        for seed, policy in enumerate(SEEDED.values()):
            prompt = random_prompt(target, seed)
            assert ask(engine, prompt, policy=policy, seed=seed).wait() == plain(target, prompt, policy, 24, seed)


def test_a_seeded_request_gives_the_same_tokens_without_a_drafter(target: Target) -> None:
    prompt = random_prompt(target, 2)
    with running(target) as engine:
        for policy in SEEDED.values():
            assert ask(engine, prompt, policy=policy, seed=5).wait() == plain(target, prompt, policy, 24, 5)


def test_common_noise_lets_proposals_of_seeded_requests_be_accepted(target: Target) -> None:
    with running(target, first_layers(target, layers=3), draft_length=4) as engine:
        usage = ask(engine, random_prompt(target, 5), 21, Policy(1.0), seed=3).usage
    assert [(r.proposed, r.accepted) for r in usage.rounds[:-1]] == [(4, 4)] * (len(usage.rounds) - 1)


def test_a_seeded_request_gives_the_same_tokens_among_others(target: Target) -> None:
    policies = [*SEEDED.values(), *PENALISED.values(), GREEDY, Policy(1.0), Policy(1.3, top_k=5)]
    prompts = [random_prompt(target, i, 4 + i) for i in range(len(policies))]
    with running(target, first_layers(target, layers=2), slots=5) as engine:
        seeds = [i if p in SEEDED.values() else None for i, p in enumerate(policies)]
        clients = [
            ask(engine, prompt, 30, policy, seed=seed, draft_length=i % 5)
            for i, (prompt, policy, seed) in enumerate(zip(prompts, policies, seeds, strict=True))
        ]
        for client, prompt, policy, seed in zip(clients, prompts, policies, seeds, strict=True):
            if policy.greedy or seed is not None:
                assert client.wait() == plain(target, prompt, policy, 30, seed)


def test_swaps_in_the_middle_change_no_token_of_a_seeded_request(target: Target) -> None:
    prompts = [random_prompt(target, seed, 12) for seed in range(4)]
    with running(target, first_layers(target, layers=1)) as engine:
        asked = list(zip(prompts, SEEDED.values(), strict=True))
        clients = [ask(engine, prompt, 80, policy, seed=11) for prompt, policy in asked]
        for number in range(2, 8):
            engine.swap(number, first_layers(target, layers=1 + number % 3, seed=number)).result(timeout=30)
        outputs = [client.wait() for client in clients]
        used = {r.version for client in clients for r in client.usage.rounds}
    assert outputs == [plain(target, prompt, policy, 80, 11) for prompt, policy in asked]
    assert len(used) > 1


def test_another_seed_gives_other_tokens(target: Target) -> None:
    prompt = random_prompt(target, 3)
    with running(target, first_layers(target, layers=2)) as engine:
        outputs = [tuple(ask(engine, prompt, policy=Policy(1.0), seed=seed).wait()) for seed in range(5)]
    assert len(set(outputs)) == 5


@pytest.mark.parametrize("vocabulary", [None, 100], ids=["whole", "reduced"])
def test_trees_change_no_token_of_penalised_and_seeded_requests(target: Target, vocabulary: int | None) -> None:
    policies = [*SEEDED.values(), *PENALISED.values(), GREEDY]
    prompts = [random_prompt(target, i, 4 + i) for i in range(len(policies))]
    seeds = [i if p in SEEDED.values() else None for i, p in enumerate(policies)]
    with running(target, first_layers(target, 2, vocabulary), slots=5, tree_nodes=12) as engine:
        asked = zip(prompts, policies, seeds, strict=True)
        clients = [ask(engine, prompt, policy=policy, seed=seed) for prompt, policy, seed in asked]
        outputs = [client.wait() for client in clients]
    expected = zip(prompts, policies, seeds, strict=True)
    assert outputs == [plain(target, prompt, policy, 24, seed) for prompt, policy, seed in expected]
