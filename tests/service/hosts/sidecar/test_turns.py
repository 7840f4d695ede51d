"""Which requests a sidecar observes."""

from itertools import groupby
from random import Random

import pytest

from service.hosts.sidecar.turns import MOST, Turns


def drawn(share: float, under_way: int, requests: int, seed: int = 0) -> list[bool]:
    turns = Turns(share, Random(seed))
    return [turns.takes(under_way) for _ in range(requests)]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.75])
@pytest.mark.parametrize("under_way", [1, 4, 50])
def test_the_share_comes_out(share: float, under_way: int) -> None:
    """At most one cycle is not over, and the others round their length up as often as down."""
    observed = drawn(share, under_way, 40_000)
    assert sum(observed) / 40_000 == pytest.approx(share, abs=0.02 * share + under_way / 40_000)


@pytest.mark.parametrize("under_way", [1, 4, 50, 1000])
def test_as_many_in_a_row_as_are_under_way(under_way: int) -> None:
    rows = [len(list(row)) for taken, row in groupby(drawn(0.05, under_way, 40_000)) if taken]
    assert {row % min(under_way, MOST) for row in rows[:-1]} == {0}
    assert len(rows) > 20


def test_every_request_is_as_likely_as_any_other() -> None:
    """The first ten of a sidecar's life at one half: 4,000 draws, each count within five deviations of 2,000."""
    counts = [sum(column) for column in zip(*(drawn(0.5, 1, 10, seed) for seed in range(4000)), strict=True)]
    assert all(abs(count - 2000) < 5 * 1000**0.5 for count in counts)


def test_all_and_none() -> None:
    assert all(drawn(1.0, 3, 100))
    assert not any(drawn(0.0, 3, 100))
