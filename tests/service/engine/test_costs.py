"""Predicted durations of rounds against the machine that they were measured on."""

import random
from collections.abc import Iterable

import pytest

from service.engine.costs import BATCHES, Costs, Mean, Played, bucket
from tests.service.engine.machine import BF16, FP32, Table, verify_ms


def round_ms(table: Table, batch: int, k: int) -> float:
    return verify_ms(table, batch, k + 1) + k * (2 + 0.1 * batch)


def played(batch: int, k: int, table: Table = BF16, slow: float = 1.0, absorbed: int = 0, extra: float = 0) -> Played:
    """A round that took what the table says, times `slow`; drafting took `extra` ms more."""
    draft = k * (2 + 0.1 * batch) * slow + extra
    return Played(batch, k, draft, verify_ms(table, batch, k + 1) * slow, 0.0, absorbed, False, ())


def learned(cells: Iterable[tuple[int, int]], table: Table = BF16, rounds: int = 20) -> Costs:
    """Costs after `rounds` of each (batch, draft length)."""
    costs = Costs()
    for _ in range(rounds):
        for batch, k in cells:
            costs.observe(played(batch, k, table))
    return costs


@pytest.mark.parametrize("table", [BF16, FP32])
def test_what_was_played_is_predicted_as_it_was(table: Table) -> None:
    cells = [(batch, k) for batch in (1, 4, 8, 16) for k in (0, 1, 2, 4)]
    costs = learned(cells, table)
    for batch, k in cells:
        assert costs.predict(batch, k, False) == pytest.approx(round_ms(table, batch, k), rel=0.05)


def test_what_was_never_played_is_filled_in_from_the_rest() -> None:
    costs = learned([(1, 0), (1, 4), (16, 0), (16, 2)])
    for batch, k in [(1, 2), (4, 0), (4, 2), (8, 1), (16, 1), (16, 4)]:
        assert costs.predict(batch, k, False) == pytest.approx(round_ms(BF16, batch, k), rel=0.15)


def test_batches_within_a_bucket_are_told_apart() -> None:
    costs = learned([(1, 0), (1, 2), (9, 0), (9, 2), (16, 0), (16, 2)])
    assert bucket(9) == bucket(12)
    assert costs.predict(12, 2, False) == pytest.approx(round_ms(BF16, 12, 2), rel=0.05)


def test_rounds_that_a_neighbour_triples_hardly_count() -> None:
    costs, draws = Costs(), random.Random(0)
    for _ in range(500):
        costs.observe(played(4, 2, slow=3 if draws.random() < 0.1 else draws.lognormvariate(0, 0.1)))
    assert costs.predict(4, 2, False) == pytest.approx(round_ms(BF16, 4, 2), rel=0.1)


def test_a_load_that_doubles_is_carried_over_to_what_is_not_played() -> None:
    costs = learned([(8, 0), (8, 2), (8, 4)])
    before = costs.predict(8, 0, False)
    for _ in range(30):
        costs.observe(played(8, 4, slow=2.0))
    assert costs.predict(8, 4, False) == pytest.approx(2 * round_ms(BF16, 8, 4), rel=0.1)
    assert costs.predict(8, 0, False) == pytest.approx(2 * before, rel=0.15)


def test_sampled_rounds_have_costs_of_their_own() -> None:
    costs = learned([(4, 0), (4, 2)])
    for _ in range(20):
        costs.observe(Played(4, 2, 4.8, 80.0, 0.0, 0, True, ()))
    assert costs.predict(4, 2, True) == pytest.approx(84.8, rel=0.05)
    assert costs.predict(4, 2, False) == pytest.approx(round_ms(BF16, 4, 2), rel=0.1)


def test_catching_up_after_a_plain_spell_is_no_cost_of_a_steady_round() -> None:
    costs = learned([(4, 0), (4, 2)])
    for _ in range(3):
        for _ in range(20):
            costs.observe(played(4, 0))
        costs.observe(played(4, 2, absorbed=400, extra=90.0))
        for _ in range(3):
            costs.observe(played(4, 2, absorbed=4))
    assert costs.predict(4, 2, False) == pytest.approx(round_ms(BF16, 4, 2), rel=0.05)
    assert costs.entry_ms(4) == 0  # the drafter is up to date
    for _ in range(20):
        costs.observe(played(4, 0))
    assert costs.entry_ms(4) == pytest.approx(90.0, rel=0.3)


def test_prompts_that_keep_joining_are_a_cost_of_speculating() -> None:
    costs = learned([(4, 0), (4, 2)])
    for i in range(400):
        joined = i % 4 == 0
        costs.observe(played(4, 2, absorbed=200 if joined else 4, extra=20.0 if joined else 0.0))
    assert costs.predict(4, 2, False) - round_ms(BF16, 4, 2) == pytest.approx(5.0, abs=2.0)
    assert costs.predict(4, 0, False) == pytest.approx(round_ms(BF16, 4, 0), rel=0.05)


def test_after_a_swap_the_next_drafter_catches_up_on_everything() -> None:
    costs = learned([(4, 0), (4, 2)])
    costs.swapped()
    costs.observe(played(4, 2, absorbed=400, extra=90.0))
    assert costs.predict(4, 2, False) == pytest.approx(round_ms(BF16, 4, 2), rel=0.05)
    costs.swapped()
    assert costs.entry_ms(4) > 30


def test_a_probe_is_charged_for_catching_up_but_not_for_a_neighbour() -> None:
    costs = learned([(4, 0), (4, 2)])
    usual = round_ms(BF16, 4, 2)
    assert costs.charge(played(4, 2, slow=3.0)) < 1.4 * usual
    costs.swapped()
    assert costs.charge(played(4, 2, absorbed=400, extra=90.0)) == pytest.approx(usual + 90.0, rel=0.1)


def test_every_batch_has_a_bucket_and_there_are_few() -> None:
    assert [bucket(b) for b in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 16, 24]
    assert bucket(100_000) == BATCHES[-1]


def test_a_mean_forgets_more_the_longer_ago_its_rounds_were() -> None:
    close, far = Mean(), Mean()
    for mean in (close, far):
        for _ in range(200):
            mean.add(100.0, 1)
    close.add(120.0, 1)
    far.add(120.0, 500)
    assert 100 < close.value < 101 < far.value < 105
