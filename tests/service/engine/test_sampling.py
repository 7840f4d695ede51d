"""Sampled output through the whole engine follows the target's distribution, whatever the policy and the drafter.

All policies decode in one batch, mixed. Of each 500 outputs of four tokens are held against their exact
probabilities by a chi-squared test at 1e-6: sampled rows are seeded by the system, so one run in some 60,000
raises a false alarm somewhere. The wrong algorithms miss by far more than that many draws can hide (p below
1e-40 with 400 of them).
"""

from collections.abc import Sequence

import pytest
import torch

from adapter import processing, sampling, tree_acceptance
from adapter.acceptance import Drawn
from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import Drafter
from adapter.policy import Policy
from adapter.processing import DraftVocabulary, History
from adapter.target import Target
from tests.service.engine.oracle import GREEDY, ask, first_layers, running
from tests.service.engine.small import LENGTH, PROMPT, SIZE, Output, exact, p_value, small_target

REQUESTS = 500
FALSE_ALARM = 1e-6
POLICIES = {
    "temperature_1": Policy(1.0),
    "hot": Policy(2.0),
    "cold": Policy(0.5),
    "top_k": Policy(1.2, top_k=3),
    "top_p": Policy(1.0, top_p=0.7),
    "min_p": Policy(1.2, min_p=0.2),
    "top_k_and_top_p": Policy(1.5, top_k=4, top_p=0.8),
    "repetition_penalty": Policy(1.0, repetition_penalty=4.0),
    "presence_penalty": Policy(1.0, presence_penalty=1.5),
    "frequency_penalty": Policy(1.0, frequency_penalty=1.2),
    "logit_bias": Policy(1.0, logit_bias=((1, 2.0), (4, -3.0))),
    "all_together": Policy(0.9, 5, 0.95, 0.02, 1.2, 0.4, 0.3, ((3, 1.0),)),
}


class Alternating:
    """A constraint for the test: no token stands twice in a row."""

    def __init__(self) -> None:
        self._text: list[int] = []

    def allowed(self, drafted: Sequence[int]) -> torch.Tensor:
        return no_repeat([*self._text, *drafted])

    def commit(self, tokens: Sequence[int]) -> None:
        self._text += tokens


def no_repeat(output: Sequence[int]) -> torch.Tensor:
    allowed = torch.ones(SIZE, dtype=torch.bool)
    allowed[list(output[-1:])] = False
    return allowed


def outputs(
    target: Target,
    drafter: Drafter,
    policies: Sequence[Policy],
    seeded: bool = False,
    constrained: bool = False,
    **config: int,
) -> list[list[Output]]:
    """REQUESTS outputs of each policy, decoded together, with a greedy request here and there."""
    total = REQUESTS * (len(policies) + 1)
    config = {"slots": 64, "draft_length": 2, "context": 16, "waiting": total, **config}
    with running(target, drafter, **config) as engine:
        clients = []
        for seed in range(REQUESTS):
            if seed % 10 == 0:
                ask(engine, PROMPT, LENGTH, GREEDY)
            options = [
                {"seed": seed if seeded else None, "constraint": Alternating() if constrained else None}
                for _ in policies
            ]
            clients.append([ask(engine, PROMPT, LENGTH, p, **o) for p, o in zip(policies, options, strict=True)])
        return [[tuple(client.wait()) for client in column] for column in zip(*clients, strict=True)]


@pytest.fixture(scope="module")
def small(target: Target) -> Target:
    return small_target(target)


@pytest.fixture(scope="module")
def mixed(small: Target) -> dict[str, list[Output]]:
    """Outputs of every policy, from one engine whose batches hold them all."""
    found = outputs(small, first_layers(small), list(POLICIES.values()))
    return dict(zip(POLICIES, found, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_sampled_output_follows_the_targets_distribution(
    small: Target, mixed: dict[str, list[Output]], name: str
) -> None:
    assert p_value(mixed[name], exact(small, POLICIES[name])) > FALSE_ALARM


@pytest.fixture(scope="module")
def mixed_trees(small: Target) -> dict[str, list[Output]]:
    """The same with trees: of every policy some outputs, from one engine."""
    found = outputs(small, first_layers(small), list(POLICIES.values()), draft_length=3, tree_nodes=7)
    return dict(zip(POLICIES, found, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_so_it_does_with_trees(small: Target, mixed_trees: dict[str, list[Output]], name: str) -> None:
    assert p_value(mixed_trees[name], exact(small, POLICIES[name])) > FALSE_ALARM


def test_some_of_the_proposals_were_accepted_and_some_refused(small: Target) -> None:
    with running(small, first_layers(small), draft_length=2, context=16) as engine:
        rounds = [r for _ in range(40) for r in ask(engine, PROMPT, LENGTH, Policy(1.0)).usage.rounds]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


@pytest.mark.parametrize("name", ["temperature_1", "top_p", "all_together"])
def test_a_reduced_draft_vocabulary_leaves_the_distribution_as_it_is(small: Target, name: str) -> None:
    reduced = CausalLM.from_target(small.model, 1, torch.tensor([4, 0, 2]))
    (found,) = outputs(small, reduced, [POLICIES[name]])
    assert p_value(found, exact(small, POLICIES[name])) > FALSE_ALARM


@pytest.mark.parametrize("name", ["temperature_1", "all_together"])
def test_over_many_seeds_seeded_output_follows_it_too(small: Target, name: str) -> None:
    (found,) = outputs(small, first_layers(small), [POLICIES[name]], seeded=True)
    assert p_value(found, exact(small, POLICIES[name])) > FALSE_ALARM


def test_a_constraint_leaves_the_distribution_over_what_it_allows(small: Target) -> None:
    (found,) = outputs(small, first_layers(small), [POLICIES["top_k"]], constrained=True)
    assert p_value(found, exact(small, POLICIES["top_k"], no_repeat)) > FALSE_ALARM


def test_the_test_sees_a_verifier_that_accepts_everything(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.verify_chain

    def credulous(
        p: torch.Tensor, drawn: Drawn | None, lengths: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        uniforms[:, :-1] = 0.0
        return right(p, drawn, lengths, uniforms)

    monkeypatch.setattr(sampling, "verify_chain", credulous)
    (found,) = outputs(small, first_layers(small), [POLICIES["hot"]])
    assert p_value(found, exact(small, POLICIES["hot"])) < FALSE_ALARM


def test_the_test_sees_a_walk_that_takes_every_first_child(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tree_acceptance.verify_siblings

    def credulous(*args: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
        accepted, following, chance = right(*args, **options)
        return torch.where(args[3] > 0, 0, accepted), following, chance

    monkeypatch.setattr(tree_acceptance, "verify_siblings", credulous)
    (found,) = outputs(small, first_layers(small), [POLICIES["hot"]], draft_length=3, tree_nodes=7)
    assert p_value(found, exact(small, POLICIES["hot"])) < FALSE_ALARM


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_the_test_sees_a_penalty_that_forgets_what_was_drafted(
    small: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def forgetful(
        logits: torch.Tensor, policy: Policy, history: History, drafted: list[int], vocabulary: DraftVocabulary | None
    ) -> None:
        processing.penalise(logits, policy, history, [], vocabulary)

    monkeypatch.setattr(sampling, "penalise", forgetful)
    (found,) = outputs(small, first_layers(small), [POLICIES[name]])
    assert p_value(found, exact(small, POLICIES[name])) < FALSE_ALARM
