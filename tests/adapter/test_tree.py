"""What a tree proposes, and the q that it says it drew from, against full forwards of the drafter."""

import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import DraftRow, Proposal, Shape
from adapter.drafters.tree import path
from adapter.policy import Policy
from adapter.sampling import Sampler
from adapter.target import Target
from service.engine import attention
from service.engine.slots import Slots
from tests.adapter.proposals import NEVER, POLICIES, PROMPTS, every_third
from tests.adapter.slow_sampling import Floats, distribution

GROWN = Shape(depth=4, nodes=12, branches=3)
FORM = (-1, -1, -1, 0, 0, 1, 3, 3, 5, 6)
FIXED = Shape(depth=4, nodes=10, branches=3, form=FORM)


@pytest.fixture(scope="module")
def drafter(target: Target) -> CausalLM:
    return every_third(target)


def propose(drafter: CausalLM, samplers: list[Sampler], shape: Shape, lengths: list[int] | None = None) -> Proposal:
    attention.install(drafter.decoder)
    slots = Slots(drafter.decoder, len(samplers), 64)
    wanted = lengths or [shape.depth] * len(samplers)
    with torch.inference_mode():
        return drafter.propose(
            slots, [DraftRow([*s.prompt], 0, k, s) for s, k in zip(samplers, wanted, strict=True)], shape
        )


def trees(proposal: Proposal) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of each row, the real ones."""
    assert proposal.parents is not None
    assert proposal.lengths is not None
    both = zip(proposal.tokens.tolist(), proposal.parents.tolist(), proposal.lengths, strict=True)
    return [(tokens[:n], parents[:n]) for tokens, parents, n in both]


def slow_q(drafter: CausalLM, sampler: Sampler, drafted: list[int]) -> Floats:
    """q over the target's vocabulary after the prompt and `drafted`, by a full forward."""
    with torch.inference_mode():
        logits = drafter.logits(drafter.hidden(torch.tensor([[*sampler.prompt, *drafted]])))[0, -1]
    everywhere = torch.full((drafter.vocab_size,), NEVER)
    everywhere[drafter.draft_to_target] = logits
    return distribution(everywhere, sampler.policy, sampler.prompt, drafted)


def log_q(drafter: CausalLM, prompt: list[int], drafted: list[int]) -> Floats:
    """The drafter's log-probabilities, temperature 1."""
    with torch.inference_mode():
        logits = drafter.logits(drafter.hidden(torch.tensor([[*prompt, *drafted]])))[0, -1]
    everywhere = torch.full((drafter.vocab_size,), NEVER)
    everywhere[drafter.draft_to_target] = logits.float().log_softmax(-1)
    found: Floats = everywhere.double().numpy()
    return found


@pytest.mark.parametrize("shape", [GROWN, FIXED], ids=["grown", "fixed"])
@pytest.mark.parametrize("seed", range(3))
def test_q_is_what_each_child_of_a_sampled_row_was_drawn_from(drafter: CausalLM, shape: Shape, seed: int) -> None:
    generators = [torch.Generator().manual_seed(seed) for _ in POLICIES]
    samplers = [Sampler(*both, [], generator) for *both, generator in zip(POLICIES, PROMPTS, generators, strict=True)]
    proposal = propose(drafter, samplers, shape)
    (drawn,) = proposal.drawn
    assert drawn.rows == (0, 2, 3)
    for s, i in enumerate(drawn.rows):
        tokens, parents = trees(proposal)[i]
        for node, token in enumerate(tokens):
            expected = slow_q(drafter, samplers[i], path(tokens, parents, node)[:-1])
            found = drawn.at(torch.full((3,), node), drafter.vocab_size)[s]
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-6)
            assert float(drawn.taken[s, node]) == pytest.approx(expected[token], rel=1e-3)


@pytest.mark.parametrize("shape", [GROWN, FIXED], ids=["grown", "fixed"])
def test_parents_stand_before_their_children_and_siblings_differ(drafter: CausalLM, shape: Shape) -> None:
    samplers = [Sampler(policy, prompt, []) for policy, prompt in zip(POLICIES, PROMPTS, strict=True)]
    for tokens, parents in trees(propose(drafter, samplers, shape)):
        assert 0 < len(tokens) <= shape.nodes
        assert all(parent < node for node, parent in enumerate(parents))
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        assert max(len(path(tokens, parents, node)) for node in range(len(tokens))) <= shape.depth


def test_a_fixed_form_is_kept(drafter: CausalLM) -> None:
    samplers = [Sampler(Policy(0.0), [5, 9, 31], []), Sampler(Policy(1.0), [8], [])]
    for _, parents in trees(propose(drafter, samplers, FIXED)):
        assert sorted(_shape(parents, -1)) == sorted(_shape(list(FORM), -1))


def _shape(parents: list[int], root: int) -> list[object]:
    """The form under a node, without names, in the order of ranks."""
    return [_shape(parents, node) for node, parent in enumerate(parents) if parent == root]


def test_greedy_children_of_a_fixed_form_are_the_drafters_best_by_rank(drafter: CausalLM) -> None:
    ((tokens, parents),) = trees(propose(drafter, [Sampler(Policy(0.0), [5, 9, 31], [])], FIXED))
    for parent in set(parents):
        children = [tokens[node] for node, above in enumerate(parents) if above == parent]
        expected = log_q(drafter, [5, 9, 31], path(tokens, parents, parent)).argsort()[::-1][: len(children)]
        assert children == expected.tolist()


def test_a_grown_tree_is_that_of_an_exhaustive_search(drafter: CausalLM) -> None:
    """Level by level the likeliest nodes are continued, and the likeliest of all that were found are proposed."""
    prompt = [40, 41, 42, 43, 44]
    found: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(GROWN.depth):
        children = []
        for drafted, value in level:
            scores = log_q(drafter, prompt, list(drafted))
            best = scores.argsort()[::-1][: GROWN.branches]
            children += [((*drafted, int(token)), value + float(scores[token])) for token in best]
        found |= dict(children)
        level = sorted(children, key=lambda child: -child[1])[: GROWN.branches]
    expected = sorted(found, key=lambda drafted: -found[drafted])[: GROWN.nodes]
    ((tokens, parents),) = trees(propose(drafter, [Sampler(Policy(0.0), prompt, [])], GROWN))
    assert {tuple(path(tokens, parents, node)) for node in range(len(tokens))} == set(expected)


def test_a_row_that_wants_less_depth_gets_no_deeper_node(drafter: CausalLM) -> None:
    samplers = [Sampler(policy, prompt, []) for policy, prompt in zip(POLICIES, PROMPTS, strict=True)]
    lengths = [1, 2, 3, 4, 1]
    for k, (tokens, parents) in zip(lengths, trees(propose(drafter, samplers, GROWN, lengths)), strict=True):
        assert max(len(path(tokens, parents, node)) for node in range(len(tokens))) <= k


def test_a_rows_tree_is_the_same_alone_and_in_a_batch(drafter: CausalLM) -> None:
    def samplers() -> list[Sampler]:
        seeded = [Sampler(Policy(0.9), [6, 6], [], seed=3)]
        both = zip(POLICIES, PROMPTS, strict=True)
        return [Sampler(p, prompt, [], torch.Generator().manual_seed(2)) for p, prompt in both] + seeded

    together = trees(propose(drafter, samplers(), GROWN))
    alone = [trees(propose(drafter, [sampler], GROWN))[0] for sampler in samplers()]
    assert together == alone


def test_a_policy_that_leaves_two_tokens_gets_no_more_children(drafter: CausalLM) -> None:
    sampler = Sampler(Policy(1.0, top_k=2), [5, 9, 31], [])
    tokens, parents = trees(propose(drafter, [sampler], FIXED))[0]
    assert parents.count(-1) == 2
    assert len(tokens) < len(FORM)
