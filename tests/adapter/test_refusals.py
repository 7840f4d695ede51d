"""How likely a refusal was: exact by enumeration, so that rows logged at refusals stand for all that was verified.

A row is logged with that probability, so the mean of refusals / chance is 1, whatever proposed and in what form.
"""

from itertools import permutations
from math import sqrt

import pytest
import torch
from torch import Tensor

from adapter.acceptance import Drawn, refused, verify_chain, verify_siblings, without
from adapter.policy import Policy
from adapter.sampling import Sampler, verify
from adapter.tree_acceptance import verify_tree
from tests.adapter.test_tree_acceptance import G3, G4, RUNS, P, Q, children, uniforms

CHOSEN = [3, 2, 1]  # of Q the likeliest first
ALWAYS_REFUSED = torch.tensor([[1 - 1e-9] * 5], dtype=torch.float64)  # but what must be accepted


def chance_of(tokens: list[int], q: Tensor | None, replaced: bool = False) -> float:
    """Of refusing these children; 0 where one of them is accepted whatever the dice say."""
    count = torch.tensor([len(tokens)])
    dice = ALWAYS_REFUSED[:, : len(tokens) + 1] if q is not None else torch.zeros(1, len(tokens) + 1)
    taken, _, chance = verify_siblings(
        P[None], None if q is None else q[None], torch.tensor([tokens]), count, dice, replaced
    )
    return chance.item() if taken.item() < 0 else 0.0


@pytest.mark.parametrize(("m", "expected"), [(1, 0.9), (2, 0.7), (3, 0.4)])
def test_of_chosen_children_it_is_what_they_leave_of_p(m: int, expected: float) -> None:
    assert chance_of(CHOSEN[:m], None) == pytest.approx(expected)


def test_of_one_drawn_child_it_is_one_less_the_overlap() -> None:
    assert chance_of([3], Q) == pytest.approx(0.4)
    assert refused(P, Q)[1].item() == pytest.approx(0.4)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_refusals_over_their_chances_come_to_one_by_enumeration(m: int, replaced: bool) -> None:
    """Over all draws of m children, sum P(draw) P(all refused | draw) / chance; the refusals are those of G3 and G4."""
    orders = (
        permutations(range(4), m) if not replaced else torch.cartesian_prod(*[torch.arange(4)] * m).view(-1, m).tolist()
    )
    total = probability = 0.0
    for tokens in map(list, orders):
        drawn, accepted_not, p, q = 1.0, 1.0, P[None], Q[None]
        for token in tokens:
            drawn *= q[0, token].item()
            accepted_not *= max(0.0, 1 - (p[0, token] / q[0, token]).item()) if q[0, token] > 0 else 0.0
            p, _ = refused(p, q)
            q = q if replaced else without(q, torch.tensor([[token]]))
        if drawn * accepted_not > 0:
            probability += drawn * accepted_not
            total += drawn * accepted_not / chance_of(tokens, Q, replaced)
    assert probability == pytest.approx(1 - (G3 if replaced else G4)[m - 1], abs=1e-6)
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("replaced", [False, True])
def test_so_they_do_over_many_runs(replaced: bool) -> None:
    tokens = children(3, replaced)
    taken, _, chance = verify_siblings(
        P.expand(RUNS, -1), Q.expand(RUNS, -1), tokens, torch.full((RUNS,), 3), uniforms(RUNS, 4), replaced
    )
    weights = torch.where(taken < 0, 1 / chance, 0.0).double()
    assert abs(weights.mean().item() - 1) < 5 * weights.std().item() / sqrt(RUNS)


def test_a_chain_knows_it_at_the_position_that_was_refused() -> None:
    p = torch.stack([P, Q, P])[None]
    q = torch.stack([P, P])[None]  # the first is always accepted; p[1] is Q, so the second's overlap is 0.6
    drawn = Drawn(torch.tensor([[0, 0]]), q, torch.tensor([[0.4, 0.4]]), rows=(0,))
    dice = torch.tensor([[0.5, 0.9, 0.5]], dtype=torch.float64)
    accepted, _, chance = verify_chain(p, drawn, torch.tensor([2]), dice)
    assert (accepted.item(), chance.item()) == (1, pytest.approx(0.4))


def test_rows_are_told_by_chains_and_trees_alike() -> None:
    def row() -> Sampler:
        return Sampler(Policy(1.0), [1], [], torch.Generator().manual_seed(0))

    logits, tokens = P.log().expand(1, 3, 4), torch.tensor([[3, 3]])
    for chain in (True, False):
        sampler = row()
        if chain:
            ((accepted, _),) = verify([sampler], [2], tokens, [], logits)
        else:
            ((path, _),) = verify_tree([sampler], [2], tokens, torch.tensor([[-1, 0]]), [], logits)
            accepted = len(path)
        assert accepted == 0
        assert sampler.refusal == pytest.approx(0.9)
