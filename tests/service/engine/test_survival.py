"""What the governor believes of a drafter, from rounds whose truth is known."""

import random

import pytest

from service.engine.survival import CLASSES, PRIOR, RowClass, Survival

CHAT, SQL = RowClass("chat", "greedy"), RowClass("sql", "greedy")
TRUTH = (0.9, 0.6, 0.8)  # P(token j accepted | the ones before it were)


def see(survival: Survival, row_class: RowClass, truth: tuple[float, ...], rounds: int, seed: int = 0) -> None:
    """Show rounds in which every position of `truth` was proposed."""
    draws = random.Random(seed)
    for _ in range(rounds):
        accepted = 0
        while accepted < len(truth) and draws.random() < truth[accepted]:
            accepted += 1
        survival.see(row_class, len(truth), accepted)


def test_cumulative_survival_is_the_product_of_what_was_seen_by_position() -> None:
    survival = Survival(3)
    see(survival, CHAT, TRUTH, 2000)
    assert survival.cumulative(CHAT) == pytest.approx([0.9, 0.54, 0.432], abs=0.1)


def test_expected_tokens_are_one_and_the_sum_of_the_cumulative_survival() -> None:
    survival = Survival(3)
    see(survival, CHAT, TRUTH, 50)
    one, two, three = survival.cumulative(CHAT)
    assert survival.expected(CHAT) == pytest.approx([1.0, 1 + one, 1 + one + two, 1 + one + two + three])


def test_a_drafter_of_which_nothing_is_known_is_given_the_prior() -> None:
    assert Survival(2).cumulative(CHAT) == pytest.approx([PRIOR, PRIOR**2])


def test_positions_not_yet_proposed_are_as_the_last_one_that_was() -> None:
    survival = Survival(4)
    for i in range(300):
        survival.see(CHAT, 1, i % 2)
    one, two, three, _ = survival.cumulative(CHAT)
    assert one == pytest.approx(0.5, abs=0.05)
    assert two / one == pytest.approx(one, abs=0.05)
    assert three / two == pytest.approx(one, abs=0.05)


def test_the_estimate_follows_a_drift() -> None:
    survival = Survival(1)
    see(survival, CHAT, (0.9,), 1000)
    see(survival, CHAT, (0.1,), 300)
    assert survival.cumulative(CHAT)[0] == pytest.approx(0.1, abs=0.1)


def test_a_new_class_starts_from_what_the_others_do() -> None:
    survival = Survival(1)
    see(survival, CHAT, (0.05,), 300)
    assert survival.cumulative(SQL)[0] < 0.15


def test_classes_are_told_apart() -> None:
    survival = Survival(1)
    for seed in range(30):
        see(survival, CHAT, (0.9,), 10, seed)
        see(survival, SQL, (0.1,), 10, seed)
    assert survival.cumulative(CHAT)[0] > 0.8
    assert survival.cumulative(SQL)[0] < 0.2


def test_after_fading_a_few_rounds_outweigh_hundreds_before() -> None:
    survival = Survival(1)
    see(survival, CHAT, (0.0,), 500)
    before = survival.cumulative(CHAT)[0]
    survival.fade([CHAT])
    assert survival.cumulative(CHAT)[0] == pytest.approx(before, abs=0.1)
    see(survival, CHAT, (1.0,), 8)
    assert survival.cumulative(CHAT)[0] > 0.4


def test_what_is_hoped_for_is_above_what_is_expected_and_comes_down_to_it() -> None:
    survival = Survival(3)
    see(survival, CHAT, (0.1, 0.1, 0.1), 10)
    early = survival.hoped(CHAT)[3] - survival.expected(CHAT)[3]
    see(survival, CHAT, (0.1, 0.1, 0.1), 500)
    late = survival.hoped(CHAT)[3] - survival.expected(CHAT)[3]
    assert early > 2 * late > 0


def test_a_plain_round_says_nothing_of_the_drafter() -> None:
    survival = Survival(1)
    survival.see(CHAT, 0, 0)
    assert survival.known == 0
    survival.see(CHAT, 1, 0)
    assert survival.known == 1


def test_of_ten_thousand_classes_the_ones_not_seen_for_longest_are_dropped() -> None:
    survival = Survival(2)
    for i in range(10_000):
        survival.see(RowClass(f"w{i}", "greedy"), 2, 0)
        survival.see(CHAT, 2, 2)
    assert len(survival._classes) == CLASSES
    assert survival.cumulative(CHAT)[0] > 0.95
    assert survival.cumulative(RowClass("w9999", "greedy")) < survival.cumulative(RowClass("w1", "greedy"))
