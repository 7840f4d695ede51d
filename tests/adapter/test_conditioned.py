"""Drafters conditioned on hidden states propose, while serving, what training and replay think that they would."""

import pytest
import torch
from torch import Tensor

from adapter.drafters.conditioned import no_deeper, shifted
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.protocol import Proposal, Shape
from adapter.policy import Policy
from adapter.sampling import Sampler, sampled_rows
from adapter.target import Target
from tests.adapter.conditioned import CONDITIONED, Server, first, hidden_of, shaken

K = 3
PROMPTS = [[5, 9, 31, 7], [8, 12], [40, 41, 42, 43, 44, 45, 9]]
EVERY_THIRD = torch.arange(0, 318, 3)


@pytest.fixture(scope="module", params=CONDITIONED)
def drafter(request: pytest.FixtureRequest, target: Target) -> LearntDrafter:
    return shaken(first(target, request.param, K, EVERY_THIRD))


def proposed(
    target: Target,
    drafter: LearntDrafter,
    prompts: list[list[int]],
    shape: Shape,
    samplers: list[Sampler] | None = None,
) -> Proposal:
    server = Server(target, drafter, len(prompts))
    server.follow(prompts)
    with torch.inference_mode():
        return drafter.propose(server.memory, server.rows(prompts, shape.depth, samplers or ()), shape)


@torch.inference_mode()
def forced(target: Target, drafter: LearntDrafter, prompt: list[int], drafted: list[int]) -> Tensor:
    """The logits [K, V_d] at each depth of a proposal after the prompt, if `drafted` were the text that followed."""
    tokens = [*prompt, *drafted]
    hidden = hidden_of(target, drafter, tokens)[None]
    states = drafter.unrolled(torch.tensor([tokens]), hidden, None, K)
    return torch.stack([drafter.logits(state[0, len(prompt) - 1], j) for j, state in enumerate(states)])


def test_a_chain_is_what_the_unrolled_drafter_says_step_by_step(target: Target, drafter: LearntDrafter) -> None:
    """Alone and in a batch of rows of other lengths."""
    together = proposed(target, drafter, PROMPTS, Shape.chain(K)).tokens.tolist()
    for prompt, chain in zip(PROMPTS, together, strict=True):
        assert proposed(target, drafter, [prompt], Shape.chain(K)).tokens.tolist() == [chain]
        logits = forced(target, drafter, prompt, chain)
        assert drafter.draft_to_target[logits.argmax(-1)].tolist() == chain


def test_sampled_tokens_are_drawn_from_what_the_unrolled_drafter_says(target: Target, drafter: LearntDrafter) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    policies = [Policy(1.0), Policy(0.0), Policy(1.5)]
    samplers = [Sampler(p, prompt, [], g) for p, prompt, g in zip(policies, PROMPTS, generators, strict=True)]
    made = proposed(target, drafter, PROMPTS, Shape.chain(K), samplers)
    (drawn,) = made.drawn
    assert drawn.q is not None
    for s, row in enumerate(sampled_rows(samplers)):
        logits = forced(target, drafter, PROMPTS[row], made.tokens[row].tolist())
        expected = (logits / policies[row].temperature).softmax(-1)
        torch.testing.assert_close(drawn.q[s], expected, rtol=1e-3, atol=1e-6)


def test_every_path_of_a_tree_is_what_the_unrolled_drafter_says(target: Target, drafter: LearntDrafter) -> None:
    """Each node's children are the likeliest tokens after the path to it."""
    branches = 3
    made = proposed(target, drafter, PROMPTS, Shape(K, 12, branches))
    assert made.parents is not None
    assert made.lengths is not None
    for row, prompt in enumerate(PROMPTS):
        tokens, parents = made.tokens[row].tolist(), made.parents[row].tolist()
        assert made.lengths[row] == 12
        for node in range(-1, 12):
            children = [tokens[child] for child in range(12) if parents[child] == node]
            path: list[int] = []
            above = node
            while above >= 0:
                path.insert(0, tokens[above])
                above = parents[above]
            if children:
                logits = forced(target, drafter, prompt, path + [0] * (K - len(path)))[len(path)]
                best = drafter.draft_to_target[logits.topk(branches).indices].tolist()
                assert children == best[: len(children)]


def test_of_a_tree_the_nodes_of_the_highest_products_are_proposed(target: Target) -> None:
    """Medusa: held against the whole Cartesian product."""
    medusa = shaken(first(target, "medusa", 2), 0.3)
    made = proposed(target, medusa, [PROMPTS[0]], Shape(2, 9, 6))
    logs = forced(target, medusa, PROMPTS[0], [0, 0])[:2].log_softmax(-1)
    products = torch.cat([logs[0], (logs[0][:, None] + logs[1]).flatten()]).topk(9).values
    assert made.parents is not None
    found = []
    for token, parent in zip(made.tokens[0].tolist(), made.parents[0].tolist(), strict=True):
        found.append(float(logs[0, token] if parent < 0 else logs[0, made.tokens[0, parent]] + logs[1, token]))
    torch.testing.assert_close(torch.tensor(sorted(found, reverse=True)), products)


def test_a_tree_of_a_fixed_form_is_filled(target: Target, drafter: LearntDrafter) -> None:
    form = (-1, -1, 0, 0, 2)
    made = proposed(target, drafter, PROMPTS[:1], Shape(3, 5, form=form))
    assert made.parents is not None
    assert made.parents[0].tolist() == list(form)
    logits = forced(target, drafter, PROMPTS[0], [int(made.tokens[0, 0]), 0, 0])
    assert drafter.draft_to_target[logits[0].topk(2).indices].tolist() == made.tokens[0, :2].tolist()
    assert drafter.draft_to_target[logits[1].topk(2).indices].tolist() == made.tokens[0, 2:4].tolist()


def test_a_prompt_followed_in_pieces_gives_the_same_proposal(target: Target, drafter: LearntDrafter) -> None:
    prompt = PROMPTS[2]
    server = Server(target, drafter, 1)
    for end in (2, 3, len(prompt) - 1):
        server.follow([prompt], [end])
    with torch.inference_mode():
        made = drafter.propose(server.memory, server.rows([prompt], K), Shape.chain(K))
    assert torch.equal(made.tokens, proposed(target, drafter, [prompt], Shape.chain(K)).tokens)


def test_what_was_drafted_in_vain_is_forgotten(target: Target, drafter: LearntDrafter) -> None:
    """After a round that another text followed, the proposal is that of a server that never drafted the other."""
    server = Server(target, drafter, 2)
    texts = [[*prompt] for prompt in PROMPTS[:2]]
    for following in ([17], [18, 19, 20], [21]):
        server.follow(texts)
        with torch.inference_mode():
            drafter.propose(server.memory, server.rows(texts, K), Shape(K, 8, 3))
        texts = [text + following for text in texts]
    server.follow(texts)
    with torch.inference_mode():
        made = drafter.propose(server.memory, server.rows(texts, K), Shape.chain(K))
    assert torch.equal(made.tokens, proposed(target, drafter, texts, Shape.chain(K)).tokens)


def test_a_proposal_is_no_deeper_than_the_drafter_and_says_so(target: Target, drafter: LearntDrafter) -> None:
    made = proposed(target, drafter, PROMPTS, Shape.chain(K + 2))
    assert made.tokens.shape[1] == K
    assert made.lengths == [K] * len(PROMPTS)
    assert torch.equal(made.tokens, proposed(target, drafter, PROMPTS, Shape.chain(K)).tokens)


def test_shapes_are_cut_at_a_depth() -> None:
    assert no_deeper(Shape.chain(5), 3) == Shape.chain(3)
    assert no_deeper(Shape(5, 20, 4), 3) == Shape(3, 20, 4)
    assert no_deeper(Shape(4, 6, form=(-1, 0, -1, 1, 2, 3)), 2) == Shape(2, 4, form=(-1, 0, -1, 2))
    assert no_deeper(Shape(2, 6, 3), 3) == Shape(2, 6, 3)


def test_shifted_states_leave_zeros() -> None:
    states = torch.arange(1.0, 5.0)[None, :, None]
    assert shifted(states, 1).flatten().tolist() == [0, 1, 2, 3]
    assert shifted(states, -2).flatten().tolist() == [3, 4, 0, 0]
    assert shifted(states, 0) is states


def test_texts_packed_into_one_row_do_not_see_each_other(target: Target, drafter: LearntDrafter) -> None:
    alone = [
        list(drafter.unrolled(torch.tensor([text]), hidden_of(target, drafter, text)[None], None, K))
        for text in PROMPTS
    ]
    hidden = torch.cat([hidden_of(target, drafter, text) for text in PROMPTS])[None]
    positions = torch.cat([torch.arange(len(text)) for text in PROMPTS])[None]
    packed = drafter.unrolled(torch.tensor([[token for text in PROMPTS for token in text]]), hidden, positions, K)
    for depth, states in enumerate(packed):
        start = 0
        for text, unrolled in zip(PROMPTS, alone, strict=True):
            real = slice(1, len(text) - depth)  # there a state stands before, and the token lies in the text
            torch.testing.assert_close(states[0, start:][real], unrolled[depth][0][real], rtol=1e-4, atol=1e-5)
            start += len(text)
