"""The fixed form that a tree is given, by what was accepted in its workload."""

import random
from itertools import product

import pytest

from service.engine.ranks import WORKLOADS, Ranks

SURE, WIDE = "sure", "wide"


def learned() -> Ranks:
    """In one workload the first child is nearly always right; in the other any of four may be, and then the first."""
    ranks, draws = Ranks(4, 4), random.Random(0)
    for _ in range(2000):
        ranks.see(SURE, [(4, 0 if draws.random() < 0.95 else -1)] * 4)
        ranks.see(WIDE, [(4, draws.randrange(4)), *[(4, 0 if draws.random() < 0.3 else -1)] * 3])
    return ranks


def depths(form: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for parent in form:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def test_where_the_drafter_is_sure_the_tree_goes_deep_and_else_wide() -> None:
    ranks = learned()
    assert ranks.form({SURE: 1}, 4) == (-1, 0, 1, 2)
    assert ranks.form({WIDE: 1}, 4) == (-1, -1, -1, -1)


def test_rows_of_both_get_a_tree_between() -> None:
    form = learned().form({SURE: 2, WIDE: 1}, 6)
    assert max(depths(form)) > 1
    assert form.count(-1) > 1


@pytest.mark.parametrize("nodes", [1, 5, 8, 32])
def test_a_form_has_its_nodes_parents_before_children_and_keeps_within_its_bounds(nodes: int) -> None:
    form = learned().form({SURE: 1, WIDE: 3}, nodes)
    assert len(form) == nodes
    assert all(parent < node for node, parent in enumerate(form))
    assert max(depths(form)) <= 4
    assert max(form.count(parent) for parent in form) <= 4


def test_no_form_of_so_many_nodes_promises_more() -> None:
    """Against all forms of four nodes, by the shares that it goes by itself."""
    ranks, draws = Ranks(3, 3), random.Random(4)
    for _ in range(500):
        ranks.see("w", [(3, draws.choice([0, 0, 0, 1, 1, 2, -1])) for _ in range(3)])

    def worth(form: tuple[int, ...]) -> float:
        values: list[float] = []
        for node, parent in enumerate(form):
            rank, depth = form[:node].count(parent), depths(form)[node] - 1
            share = ranks._share({"w": 1}, depth, rank) if rank < 3 and depth < 3 else 0.0
            values.append(share * (values[parent] if parent >= 0 else 1.0))
        return sum(values)

    every = [(-1, *rest) for rest in product(*[range(-1, node) for node in range(1, 4)])]
    assert worth(ranks.form({"w": 1}, 4)) == pytest.approx(max(map(worth, every)))


def test_memory_is_bounded_whatever_clients_call_their_workloads() -> None:
    ranks = Ranks(2, 2)
    for n in range(1000):
        ranks.see(f"w{n}", [(1, 0)])
    assert len(ranks._workloads) <= WORKLOADS
