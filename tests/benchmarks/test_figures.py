"""The rows of the table from runs that are written down by hand."""

from dataclasses import fields

import pytest

from benchmarks.figures import Measured, Row, Setting, rejection_positions, rows_of, verdict, without_repeats
from benchmarks.meanings import MEANINGS
from benchmarks.run import Answer, PlayedRound, Progress, Run

SETTING = Setting("code", 0.0, 1, 1, 0.5)


def run(tokens: int, ms: float, round_ms: float, rounds: tuple[PlayedRound, ...] = ()) -> Run:
    """One request of so many tokens, decoded in `ms`."""
    answer = Answer(tuple(range(tokens)), ms, rounds)
    return Run((answer,), ms / 1e3, Progress(tokens - 1, ms, (round_ms,)), 100.0)


PLAIN = Measured("plain", None, (run(7, 60.0, 10.0), run(7, 60.0, 10.0)))
ROUNDS = (PlayedRound(2, 2, 2.0, 10.0), PlayedRound(2, 0, 2.0, 10.0), PlayedRound(2, 1, 2.0, 10.0))
FAST = Measured("speculative", 2, (run(7, 40.0, 12.0, ROUNDS), run(7, 30.0, 12.0, ROUNDS)))
GOVERNED = Measured("governed", 2, (run(7, 50.0, 12.0, ROUNDS), run(7, 70.0, 12.0, ROUNDS)))
CELL = (PLAIN, FAST, GOVERNED)


def row(arm: str) -> Row:
    return next(row for row in rows_of(SETTING, CELL, (2,)) if row.arm == arm)


def test_the_ideal_speed_up_follows_from_measured_costs_and_the_ratio_from_it() -> None:
    found = row("speculative")
    assert found.acceptance_length == 2.0
    assert found.ideal_speed_up == pytest.approx(2.0 * 10.0 / 12.0)
    assert found.speed_up == pytest.approx((6 / 40 + 6 / 30) / 2 / (6 / 60))
    assert found.ratio_to_ideal == pytest.approx(found.speed_up / (20 / 12))


def test_the_acceptance_figures_are_different_ones() -> None:
    found = row("speculative")
    assert (found.proposed, found.accepted, found.rounds) == (12, 6, 6)
    assert found.acceptance_rate == 0.5
    assert found.acceptance_probability == 0.5
    assert found.acceptance_by_position == pytest.approx((2 / 3, 1 / 3))
    assert found.rejection_positions == (2, 2)


def test_plain_decoding_has_no_acceptance_and_is_its_own_measure() -> None:
    found = row("plain")
    assert (found.proposed, found.rounds, found.plain_rounds) == (0, 0, 12)
    assert found.acceptance_rate is found.acceptance_length is found.acceptance_by_position is None
    assert found.draft_ms is found.ideal_speed_up is found.verdict is None
    assert found.speed_up == 1.0


def test_the_governor_is_held_against_the_best_fixed_draft_length() -> None:
    best = (6 / 40 + 6 / 30) / 2
    assert row("governed").ratio_to_best == pytest.approx((6 / 50 + 6 / 70) / 2 / best)
    assert row("speculative").ratio_to_best is None


def test_a_larger_draft_length_than_the_governor_may_choose_is_no_measure_for_it() -> None:
    larger = Measured("speculative", 4, (run(7, 10.0, 12.0, ROUNDS),) * 2)
    found = next(row for row in rows_of(SETTING, (*CELL, larger), (2, 4)) if row.arm == "governed")
    assert found.ratio_to_best == row("governed").ratio_to_best


def test_speculation_should_be_on_only_where_it_is_faster_in_every_repeat() -> None:
    assert verdict(FAST, PLAIN) == "on"
    assert verdict(GOVERNED, PLAIN) == "unclear"
    assert verdict(Measured("speculative", 2, (run(7, 61.0, 1.0),) * 2), PLAIN) == "off"


def test_arms_without_a_draft_length_stand_under_every_k_and_are_shown_once() -> None:
    more = (*CELL, Measured("speculative", 4, FAST.runs))
    rows = rows_of(SETTING, more, (2, 4))
    assert [(row.arm, row.k) for row in rows if row.arm == "plain"] == [("plain", 2), ("plain", 4)]
    assert [(row.arm, row.k) for row in without_repeats(rows)] == [
        ("plain", 2), ("speculative", 2), ("governed", 2), ("speculative", 4),
    ]  # fmt: skip


def test_a_fully_accepted_round_is_no_rejection() -> None:
    assert rejection_positions([PlayedRound(3, 3, 0.0, 0.0), PlayedRound(3, 2, 0.0, 0.0)]) == (0, 0, 1)


def test_every_figure_is_explained() -> None:
    known = {field.name for field in fields(Row)} - {"workload", "temperature", "requests", "repeats"}
    assert known == set(MEANINGS)
