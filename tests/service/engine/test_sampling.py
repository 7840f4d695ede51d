"""Sampled output through the whole engine follows the target's distribution, whatever the drafter is.

Each test draws 1,500 outputs of three tokens with fixed seeds, and holds the counts of all sequences against
their exact probabilities by a chi-squared test at 1e-6: with free seeds, one false alarm in a million runs.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from adapter.acceptance import distribution
from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target
from service.engine import rounds
from tests.service.engine.oracle import ask, first_layers, random_prompt, running

REQUESTS = 1_500
FALSE_ALARM = 1e-6
LENGTH = 3


def exact(target: Target, prompt: list[int], policy: Policy) -> dict[tuple[int, ...], float]:
    """The probability of every output of three tokens, by full forwards."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.inference_mode():
        for _ in range(LENGTH):
            longer = {}
            for output, probability in found.items():
                logits = target.model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, -1]
                p = distribution(logits, policy)
                longer.update({(*output, int(t)): probability * float(p[t]) for t in p.nonzero()[:, 0]})
            found = longer
    return found


def p_value(target: Target, drafter: CausalLM, policy: Policy) -> float:
    prompt = random_prompt(target, 11)
    expected = exact(target, prompt, policy)
    with running(target, drafter, slots=32, draft_length=2, waiting=REQUESTS) as engine:
        clients = [ask(engine, prompt, LENGTH, policy, seed=seed) for seed in range(REQUESTS)]
        outputs = [tuple(client.wait()) for client in clients]
    assert set(outputs) <= set(expected)
    # Cells of fewer than five expected draws are pooled, as the test asks for.
    pooled = [o for o, p in expected.items() if p * REQUESTS < 5]
    cells = [[o] for o in expected if o not in set(pooled)] + ([pooled] if pooled else [])
    counts = [sum(outputs.count(o) for o in cell) for cell in cells]
    odds = np.array([sum(expected[o] for o in cell) for cell in cells])
    return float(chisquare(counts, odds / odds.sum() * REQUESTS).pvalue)


@pytest.fixture
def endless(target: Target) -> Target:
    """The target without an end of text, so that every output has its three tokens."""
    return Target(**{**vars(target), "eos_ids": frozenset()})


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        (Policy(temperature=1.0, top_k=3), 2),
        (Policy(temperature=1.6, top_k=3), 1),
        (Policy(temperature=1.0, top_p=0.5), 2),
    ],
    ids=["top_k", "hot_and_poor_drafter", "top_p"],
)
def test_sampled_output_follows_the_targets_distribution(endless: Target, policy: Policy, layers: int) -> None:
    assert p_value(endless, first_layers(endless, layers), policy) > FALSE_ALARM


def test_a_reduced_draft_vocabulary_leaves_the_distribution_as_it_is(endless: Target) -> None:
    assert p_value(endless, first_layers(endless, 2, vocabulary=160), Policy(1.0, top_k=3)) > FALSE_ALARM


def test_the_test_sees_a_verifier_that_accepts_everything(endless: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(p: torch.Tensor, q: torch.Tensor, proposed: list[int], generator: torch.Generator) -> tuple[int, int]:
        return len(proposed), int(torch.multinomial(p[len(proposed)], 1, generator=generator))

    monkeypatch.setattr(rounds, "verify_chain", credulous)
    with pytest.raises(AssertionError):  # it even emits what the target never would
        assert p_value(endless, first_layers(endless, 1), Policy(1.0, top_k=3)) > FALSE_ALARM
