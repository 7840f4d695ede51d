"""The sequential test over a canary, by simulation: a tenth of the requests goes to the candidate.

It is the test of tests/adapter/test_watch.py with the shares turned round: its error rate under peeking, its power,
and what becomes of a canary that nothing was proved of.
"""

from math import log

import numpy as np
import pytest

from adapter.watch import Floats, WatchConfig, capital, falls, judge, mean_fall
from storage.observed import Observation
from tests.adapter.test_watch import Traffic, collapsing, steady, wandering

CANARY, ALPHA = 0.1, 0.05
RUNS, REQUESTS = 300, 3000
CONFIG = WatchConfig(canary=CANARY)


def run(traffic: Traffic, drop: float, seed: int, n: int = REQUESTS) -> tuple[np.ndarray, Floats]:
    """(served by the live version, acceptance rate) of n requests; the canary's rate is lower by `drop`."""
    generator = np.random.default_rng(seed)
    held = generator.random(n) >= CANARY
    mean = traffic(n, generator) - np.where(held, 0.0, drop)
    return held, np.clip(mean + generator.normal(0, 0.2, n), 0.0, 1.0)


def alarm_at(held: np.ndarray, rates: Floats, alpha: float) -> float:
    """The request after which the canary is said to be worse; infinity if never."""
    d, below, _ = falls(held, rates, 1 - CANARY)
    reached = capital(d, below, 0.0) >= log(1 / alpha)
    return float(reached.argmax() + 1) if reached.any() else float("inf")


def observations(n: int, drop: float, seed: int = 0, strayed: bool = False) -> list[Observation]:
    held, rates = run(steady, drop, seed, n)
    return [
        Observation("code", "greedy", bool(h), strayed and not h, 40, round(40 * r), 10 + round(40 * r), 200.0)
        for h, r in zip(held, rates, strict=True)
    ]


@pytest.mark.parametrize("traffic", [steady, collapsing, wandering])
def test_a_canary_that_is_as_good_is_blamed_no_more_often_than_stated(traffic: Traffic) -> None:
    """5 % of 300 is 15. A test of exactly that error rate would give more than 33 once in 100,000 runs."""
    alarms = sum(alarm_at(*run(traffic, 0.0, seed), ALPHA) < float("inf") for seed in range(RUNS))
    assert alarms <= 33


def test_a_canary_that_is_worse_by_the_margin_is_called_safe_no_more_often_than_stated() -> None:
    """Of 150 runs 5 % are 7.5; more than 20 would come up once in 10,000."""
    promoted = 0
    for seed in range(150):
        d, _, above = falls(*run(steady, CONFIG.watch_margin, seed), 1 - CANARY)
        promoted += bool((capital(-d, above, -CONFIG.watch_margin) >= log(1 / ALPHA)).any())
    assert promoted <= 20


@pytest.mark.parametrize(("drop", "within"), [(0.1, 1400), (0.2, 500)])
def test_a_worse_canary_is_found_within_the_stated_number_of_requests(drop: float, within: int) -> None:
    """At the error rate of the first workload's first figure, nine times in ten: a tenth of them were the canary's."""
    found = [alarm_at(*run(steady, drop, seed), ALPHA / 4) for seed in range(100)]
    assert np.quantile(found, 0.9) <= within


def test_a_worse_canary_is_not_promoted_and_the_reason_compares_it_with_what_is_live() -> None:
    verdict = judge(observations(2500, 0.15), 1 - CANARY, CONFIG, canary=True)
    assert (verdict.state, verdict.promote) == ("worse", False)
    assert verdict.reason.startswith("worse than the live version: acce")


def test_a_canary_that_is_as_good_is_promoted_in_the_end_and_not_before() -> None:
    early = judge(observations(200, 0.0), 1 - CANARY, CONFIG, canary=True)
    assert (early.state, early.promote) == ("watching", False)
    verdict = judge(observations(4900, 0.0), 1 - CANARY, CONFIG, canary=True)
    assert (verdict.state, verdict.promote) == ("safe", True)


def test_a_canary_whose_requests_the_live_version_drafted_is_never_called_safe() -> None:
    assert judge(observations(4900, 0.0, strayed=True), 1 - CANARY, CONFIG, canary=True).state == "watching"


@pytest.mark.parametrize(("drop", "promoted", "text"), [(0.08, False, ": not promoted"), (-0.08, True, ": promoted")])
def test_when_its_time_is_over_what_was_seen_decides(drop: float, promoted: bool, text: str) -> None:
    seen = observations(400, drop)
    verdict = judge(seen, 1 - CANARY, CONFIG, hours=6.5, canary=True)
    assert (verdict.state, verdict.promote) == ("ended", promoted)
    fall = mean_fall(seen, 1 - CANARY)
    assert fall is not None
    assert fall == pytest.approx(drop, abs=0.1)
    assert verdict.reason.endswith(f"estimated fall of the acceptance rate {fall:+.3f}{text}")


def test_a_canary_that_nobody_asked_is_not_promoted() -> None:
    verdict = judge([], 1 - CANARY, CONFIG, hours=7, canary=True)
    assert (verdict.state, verdict.promote) == ("ended", False)
    assert verdict.reason.endswith("one of the two versions served no request: not promoted")


def test_a_watch_after_a_promotion_promotes_nothing() -> None:
    assert not judge(observations(4900, 0.0), 1 - CANARY, CONFIG).promote


def test_a_canary_of_most_of_the_requests_is_none() -> None:
    with pytest.raises(ValueError, match=r"canary must lie between 0 and 0\.5"):
        WatchConfig(canary=0.6)
