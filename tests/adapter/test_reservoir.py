"""The replay reservoir: bounds, uniformity, shares, and that it does not matter how records came in."""

from collections import Counter

import pytest

from adapter.reservoir import MOST, Bounds, drawn, filled
from storage.reservoirs import Kept

BOUNDS = Bounds(per_workload=20, oldest=0.0, seed=0)


def records(workload: str, count: int, window: int = 1) -> list[Kept]:
    return [Kept(f"{workload}-{window}-{n}", window, workload, float(window)) for n in range(count)]


def workloads(kept: list[Kept] | tuple[Kept, ...]) -> Counter[str]:
    return Counter(k.workload for k in kept)


def test_each_workload_keeps_its_own_however_many_another_has() -> None:
    kept = filled([*records("chat", 5000), *records("sql", 7)], BOUNDS)
    assert workloads(kept) == {"chat": 20, "sql": 7}


def test_there_is_a_bound_over_all_workloads() -> None:
    many = [k for n in range(500) for k in records(f"w{n}", 12)]
    assert len(filled(many, BOUNDS)) <= MOST
    assert len(workloads(filled(many, BOUNDS))) == 500


def test_what_is_too_old_is_left_behind() -> None:
    old, new = records("chat", 5, window=1), records("chat", 5, window=9)
    assert set(filled([*old, *new], Bounds(20, oldest=5.0, seed=0))) == set(new)


def test_filled_window_by_window_it_is_the_same_as_from_all_at_once() -> None:
    windows = [records("chat", 30, window) + records("sql", 3, window) for window in range(1, 8)]
    kept: tuple[Kept, ...] = ()
    for window in windows:
        kept = filled([*kept, *window], BOUNDS)
    assert kept == filled([k for window in windows for k in reversed(window)], BOUNDS)


def test_early_windows_are_in_it_as_often_as_late_ones() -> None:
    """Over many seeds: 20 of 200, so each of ten windows has two on average."""
    everything = [k for window in range(1, 11) for k in records("chat", 20, window)]
    found = Counter(k.window_id for seed in range(300) for k in filled(everything, Bounds(20, 0.0, seed)))
    assert all(count / 300 == pytest.approx(2.0, abs=0.3) for count in found.values())


def test_workloads_are_drawn_in_equal_shares_as_far_as_they_go() -> None:
    kept = [*records("chat", 100), *records("code", 100), *records("sql", 4)]
    assert workloads(drawn(kept, 30, "salt")) == {"chat": 13, "code": 13, "sql": 4}


def test_all_are_drawn_where_there_are_no_more() -> None:
    kept = records("chat", 9)
    assert sorted(drawn(kept, 100, "salt"), key=str) == sorted(kept, key=str)
    assert drawn([], 100, "salt") == []


def test_what_is_drawn_depends_on_the_salt_and_not_on_the_order() -> None:
    kept = records("chat", 50)
    assert drawn(kept, 10, "1/7") == drawn(kept[::-1], 10, "1/7")
    assert drawn(kept, 10, "1/7") != drawn(kept, 10, "1/8")


def test_with_more_workloads_than_records_none_is_always_left_out() -> None:
    kept = [k for n in range(20) for k in records(f"w{n}", 2)]
    found = Counter(k.workload for window in range(60) for k in drawn(kept, 5, f"0/{window}"))
    assert len(found) == 20
    assert max(found.values()) < 40
