"""Figures of curves that are written down by hand."""

import pytest

from benchmarks.curve import Played, first_from, moving_mean, row_of, stays_from
from benchmarks.traffic import Point


def played(*probabilities: float | None, after: float = 0.6, at_end: float = 0.5) -> Played:
    points = tuple(Point(1, p, ((4, 2),)) for p in probabilities)
    return Played("code", points, after, at_end, updates=1, promotions=1, training_seconds=2.0)


def test_the_mean_moves_with_the_requests_and_starts_with_those_that_there_are() -> None:
    assert moving_mean([0.0, 1.0, 1.0, 1.0], 2) == (0.0, 0.5, 1.0, 1.0)
    assert moving_mean([0.5, None, 1.0], 2) == (0.5, 0.5, 1.0)


def test_it_counts_until_the_level_is_held_and_not_until_it_is_touched() -> None:
    curve = [0.2, 0.7, 0.3, 0.7, 0.8]
    assert stays_from(curve, 0.6) == 3
    assert first_from(curve, 0.6, window=1) == 2
    assert first_from(curve, 0.6, window=3) == 4


def test_a_level_that_was_never_left_took_no_requests_and_one_that_is_not_held_is_never_reached() -> None:
    assert stays_from([0.7, 0.8], 0.6) == 0
    assert stays_from([0.7, 0.5], 0.6) is None
    assert first_from([0.1, 0.2], 0.6, window=1) is None


def test_start_and_end_are_the_first_window_and_the_last_quarter() -> None:
    row = row_of("redraft", played(0.1, 0.3, 0.5, 0.5, 0.5, 0.5, 0.8, 1.0), ceiling=1.0, window=2, k=4)
    assert (row.start, row.end) == (pytest.approx(0.2), pytest.approx(0.9))
    assert row.requests_to_90 == 7
    assert row.forgotten == pytest.approx(0.1)
    assert row.start_length == row.end_length == 3.0


def test_without_a_ceiling_nothing_is_said_of_it() -> None:
    row = row_of("redraft", played(0.5, 0.5), ceiling=None, window=2, k=4)
    assert (row.requests_to_90, row.first_at_90) == (None, None)
