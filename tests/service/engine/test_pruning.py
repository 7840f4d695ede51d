"""Trees pruned in the middle of the target's pass: what goes on is exact, what does not was never proposed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapter.drafters.protocol import Shape
from adapter.policy import Policy
from adapter.sampling import Sampler
from adapter.target import Target
from service.engine import attention
from service.engine.accept import Outcome
from service.engine.pruning import Pruning, pruning_of
from service.engine.residents import Resident
from service.engine.rounds import branches_of, settle, verify
from tests.service.engine.oracle import ask, check_swaps, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.test_riding import riding
from tests.service.engine.test_trees import (
    EXACT,
    LENGTHS,
    PARENTS,
    branches,
    full,
    proposal_of,
    row_of,
    three_rows,
    ways,
)

PASSES = (1, 2)
PRUNED = {"draft_length": 3, "tree_nodes": 9, "tree_kept": 4}
KEPT = 5


class Told:
    """An early exit that says what it is told, whatever the text is."""

    def __init__(self, layer: int, seed: int) -> None:
        self.layer, self._generator = layer, torch.Generator().manual_seed(seed)

    def log_probs(self, states: Tensor, tokens: Tensor) -> Tensor:
        chosen = torch.rand(*states.shape[:2], tokens.shape[1], generator=self._generator)
        self.said: Tensor = chosen.log()
        return self.said


@torch.inference_mode()
@pytest.mark.parametrize("layer", [0, 1])
def test_nodes_that_go_on_give_the_logits_of_their_chains_round_after_round(target: Target, layer: int) -> None:
    """Rows of different lengths; each round one of the paths that are left is accepted, and moved together."""
    slots, rows = three_rows(target)
    for number in range(3):
        proposal = proposal_of(target, seed=20 + number)
        tree = branches(rows, proposal)
        pruning = Pruning(proposal, Told(layer, number), tree.sees, KEPT)
        with pruning.in_pass(target, slots):
            logits = verify(target, slots, rows, proposal, tree)
        left = pruning.left()
        assert logits.shape[1] == KEPT + 1
        assert left.lengths == [KEPT] * 3
        outcomes = []
        for i, row in enumerate(rows):
            tokens, parents = left.tokens[i].tolist(), left.parents[i].tolist()
            for node in range(-1, KEPT):
                expected = full(target, [*row.sequence, *(tokens[n] for n in ways(parents, node))])
                torch.testing.assert_close(logits[i, node + 1], expected, atol=EXACT, rtol=EXACT)
            path = ways(parents, (KEPT - 1 - number) % KEPT)
            outcomes.append(Outcome(4, len(path), [*(tokens[n] for n in path), 9], -1, 0.0, None, path=path))
        settle(slots, [Resident(0)] * 3, rows, pruning.restored(outcomes), proposal)
        for row, outcome in zip(rows, outcomes, strict=True):
            row.sequence += outcome.tokens


@torch.inference_mode()
def test_the_nodes_of_the_highest_products_go_on_each_with_its_parent(target: Target) -> None:
    attention.install(target.model)
    proposal = proposal_of(target, seed=3)
    sees = branches_of([0, 0, 0], proposal.parents).sees
    told = Told(1, 5)
    pruning = Pruning(proposal, told, sees, KEPT)
    kept = pruning._best(torch.zeros(3, 9, 32))
    assert (kept[:, 0] == 0).all()
    for i, parents in enumerate(PARENTS):
        products = []
        for node in range(LENGTHS[i]):
            way = ways(parents, node)
            products.append(sum(float(told.said[i, parents[n] + 1, n]) for n in way))
        best = sorted(sorted(range(LENGTHS[i]), key=lambda n: -products[n])[:KEPT])
        assert kept[i, 1:].tolist() == [node + 1 for node in best]
        assert all(parents[node] < 0 or parents[node] in best for node in best)
        left = pruning.kept = kept
        assert left is kept
    made = pruning.left()
    for i, nodes in enumerate((kept[:, 1:] - 1).tolist()):
        assert made.tokens[i].tolist() == [int(proposal.tokens[i, node]) for node in nodes]
        assert [nodes[p] if p >= 0 else -1 for p in made.parents[i].tolist()] == [PARENTS[i][node] for node in nodes]


@pytest.mark.parametrize("passes", PASSES)
def test_greedy_output_equals_plain_output(target: Target, passes: int) -> None:
    """Also where the exit is wrong: its weights are random."""
    prompts = [random_prompt(target, seed, 2 + 7 * seed) for seed in range(5)]
    with running(target, riding(target, passes, layers=1), slots=3, **PRUNED) as engine:
        clients = [ask(engine, prompt, 20 + i) for i, prompt in enumerate(prompts)]
        outputs = [client.wait() for client in clients]
        accepted = sum(r.accepted for client in clients for r in client.usage.rounds)
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, prompt, 20 + i) for i, prompt in enumerate(prompts)]
    assert accepted > 0


def test_a_requests_rounds_are_the_same_alone_and_batched(target: Target) -> None:
    prompt, said = random_prompt(target, 3, 17), []
    for slots in (1, 4):
        with running(target, riding(target, 1, layers=1), slots=slots, **PRUNED) as engine:
            others = [ask(engine, random_prompt(target, s, 5 * s + 1), 30) for s in range(slots - 1)]
            client = ask(engine, prompt, 40)
            said.append([(r.start, r.proposed, r.accepted, r.rejected_token) for r in client.usage.rounds])
            for other in others:
                other.wait()
    assert said[0] == said[1]


def test_it_is_pruned_and_fewer_tokens_are_accepted_at_most(target: Target) -> None:
    accepted, seen = [], []
    for kept in (0, 2):
        with running(target, riding(target, 2, layers=1), **{**PRUNED, "tree_kept": kept}) as engine:
            head = target.model.get_output_embeddings().register_forward_pre_hook(
                lambda module, given: seen.append(given[0].shape[1])
            )
            rounds = [r for seed in range(4) for r in ask(engine, random_prompt(target, seed), 30).usage.rounds]
            head.remove()
        accepted.append(sum(r.accepted for r in rounds) / len(rounds))
    assert {3, 10} <= set(seen), "the last token and all nodes, or the two that were left"
    assert accepted[1] <= accepted[0] + 0.05


def test_swaps_between_kinds_with_and_without_an_exit_change_no_token(target: Target) -> None:
    line = [riding(target, 2), first_layers(target, layers=1), None, riding(target, 1, layers=1)]
    check_swaps(target, riding(target, 1), line, **PRUNED)


def test_a_seeded_text_is_the_same_pruned_and_not(target: Target) -> None:
    policy, prompt, said = Policy(0.9, top_p=0.95), random_prompt(target, 3), []
    for kept in (0, 3):
        with running(target, riding(target, 1, layers=1), **{**PRUNED, "tree_kept": kept}) as engine:
            said.append(ask(engine, prompt, 40, policy=policy, seed=7).wait())
    assert said[0] == said[1]


def test_a_round_with_a_sampled_row_is_not_pruned(target: Target) -> None:
    """Its children were drawn: to drop one for what it is would bias the text."""
    drafter, row = Resident(1, riding(target, 2)), row_of(target, [3, 4])
    proposal = replace(proposal_of(target, 1), drawn=())
    tree = branches([row] * 3, proposal)
    shape = Shape(4, 8, 3, kept=KEPT)
    rows = [row] * 3
    assert pruning_of([drafter] * 3, rows, proposal, tree, shape) is not None
    assert pruning_of([drafter] * 3, rows, proposal, tree, replace(shape, kept=0)) is None
    assert pruning_of([drafter] * 3, rows, proposal, tree, replace(shape, kept=8)) is None
    assert pruning_of([drafter, drafter, Resident(0)], rows, proposal, tree, shape) is None
    assert pruning_of([Resident(2, first_layers(target))] * 3, rows, proposal, tree, shape) is None
    row.sampler = Sampler(Policy(1.0), [3, 4], [])
    assert pruning_of([drafter] * 3, rows, proposal, tree, shape) is None
