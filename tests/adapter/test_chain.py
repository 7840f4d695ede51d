"""What a chain proposes, and the q that it says it drew from, against full forwards of the drafter."""

import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import DraftRow, Proposal, Shape
from adapter.policy import Policy
from adapter.sampling import Sampler, sampled_rows
from adapter.target import Target
from service.engine import attention
from service.engine.slots import Slots
from tests.adapter.proposals import NEVER, POLICIES, PROMPTS, every_third
from tests.adapter.slow_sampling import Floats, distribution

K = 3


@pytest.fixture(scope="module")
def drafter(target: Target) -> CausalLM:
    return every_third(target)


def propose(drafter: CausalLM, samplers: list[Sampler]) -> Proposal:
    attention.install(drafter.decoder)
    slots = Slots(drafter.decoder, len(samplers), 64)
    with torch.inference_mode():
        return drafter.propose(slots, [DraftRow([*s.prompt], 0, K, s) for s in samplers], Shape.chain(K))


def slow_q(drafter: CausalLM, sampler: Sampler, drafted: list[int]) -> Floats:
    """q over the target's vocabulary after the prompt and `drafted`, by a full forward."""
    with torch.inference_mode():
        logits = drafter.logits(drafter.hidden(torch.tensor([[*sampler.prompt, *drafted]])))[0, -1]
    everywhere = torch.full((drafter.vocab_size,), NEVER)
    everywhere[drafter.draft_to_target] = logits
    return distribution(everywhere, sampler.policy, sampler.prompt, drafted)


@pytest.mark.parametrize("seed", range(5))
def test_q_is_what_the_sampled_rows_were_drawn_from(drafter: CausalLM, seed: int) -> None:
    generators = [torch.Generator().manual_seed(seed) for _ in POLICIES]
    samplers = [Sampler(*both, [], generator) for *both, generator in zip(POLICIES, PROMPTS, generators, strict=True)]
    proposal = propose(drafter, samplers)
    (drawn,) = proposal.drawn
    for s, i in enumerate(sampled_rows(samplers)):
        tokens = proposal.tokens[i].tolist()
        assert drawn.tokens[s].tolist() == tokens
        for step, token in enumerate(tokens):
            expected = slow_q(drafter, samplers[i], tokens[:step])
            found = drawn.at(torch.full((3,), step), drafter.vocab_size)[s]
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-7)
            assert float(drawn.taken[s, step]) == pytest.approx(expected[token], rel=1e-3)


def test_greedy_rows_propose_the_argmax_after_what_they_proposed_before(drafter: CausalLM) -> None:
    samplers = [Sampler(policy, prompt, []) for policy, prompt in zip(POLICIES, PROMPTS, strict=True)]
    tokens = propose(drafter, samplers).tokens.tolist()
    for i, sampler in enumerate(samplers):
        if sampler.policy.greedy:
            expected = [int(slow_q(drafter, sampler, tokens[i][:step]).argmax()) for step in range(K)]
            assert tokens[i] == expected


def test_a_batch_without_sampled_rows_carries_no_q(drafter: CausalLM) -> None:
    samplers = [Sampler(Policy(0.0), [5, 6], []), Sampler(Policy(1.0), [5, 6], [], seed=1)]
    assert propose(drafter, samplers).drawn == ()
