"""The sequential test after a promotion, by simulation: its error rate under peeking, its power, and drifting traffic.

A request's acceptance rate is drawn around its traffic's mean with a spread of 0.2; a tenth of the requests is held
back. One looks after every request: a single sight of the limit anywhere on the way counts as an alarm.
"""

from collections.abc import Callable
from math import log

import numpy as np
import pytest

from adapter.watch import Floats, WatchConfig, bet_away, capital, falls, judge, lower_bound
from storage.observed import Observation

SHARE, ALPHA = 0.1, 0.05
RUNS, REQUESTS = 300, 3000
CONFIG = WatchConfig()
Traffic = Callable[[int, np.random.Generator], Floats]


def steady(n: int, generator: np.random.Generator) -> Floats:
    return np.full(n, 0.6)


def collapsing(n: int, generator: np.random.Generator) -> Floats:
    """A third of the way in, other traffic comes, of which neither version can do much."""
    return np.where(np.arange(n) < n // 3, 0.75, 0.25)


def wandering(n: int, generator: np.random.Generator) -> Floats:
    """A slow random walk, and every request like the one before."""
    return np.clip(0.5 + np.cumsum(generator.normal(0, 0.01, n)), 0.1, 0.9)


def run(traffic: Traffic, drop: float, seed: int, n: int = REQUESTS) -> tuple[np.ndarray, Floats]:
    """(held back, acceptance rate) of n requests."""
    generator = np.random.default_rng(seed)
    held = generator.random(n) < SHARE
    mean = traffic(n, generator) - np.where(held, 0.0, drop)
    return held, np.clip(mean + generator.normal(0, 0.2, n), 0.0, 1.0)


def alarm_at(held: np.ndarray, rates: Floats, alpha: float = ALPHA) -> float:
    """The request after which the live version is said to be worse; infinity if never."""
    d, below, _ = falls(held, rates, SHARE)
    reached = capital(d, below, 0.0) >= log(1 / alpha)
    return float(reached.argmax() + 1) if reached.any() else float("inf")


@pytest.mark.parametrize("traffic", [steady, collapsing, wandering])
def test_where_both_versions_are_alike_the_live_one_is_blamed_no_more_often_than_stated(traffic: Traffic) -> None:
    """5 % of 300 is 15. A test of exactly that error rate would give more than 33 once in 100,000 runs."""
    alarms = sum(alarm_at(*run(traffic, 0.0, seed)) < float("inf") for seed in range(RUNS))
    assert alarms <= 33


def test_a_comparison_without_the_holdback_would_blame_the_version_for_the_traffic() -> None:
    """The same collapse, as before and after alone would see it: the live version's own rate fell by half."""
    _, rates = run(collapsing, 0.0, seed=0)
    assert rates[: REQUESTS // 3].mean() - rates[REQUESTS // 3 :].mean() > 0.4
    assert alarm_at(*run(collapsing, 0.0, seed=0)) == float("inf")


@pytest.mark.parametrize(("drop", "within"), [(0.1, 1200), (0.05, 4500)])
def test_a_drop_is_found_within_the_stated_number_of_requests(drop: float, within: int) -> None:
    """At the error rate of the first workload's first figure, nine times in ten: a tenth of them were held back."""
    found = [alarm_at(*run(steady, drop, seed, 5000), alpha=ALPHA / 4) for seed in range(100)]
    assert np.quantile(found, 0.9) <= within


def test_a_drop_is_found_while_the_traffic_collapses() -> None:
    found = [alarm_at(*run(collapsing, 0.1, seed), alpha=ALPHA / 4) for seed in range(50)]
    assert np.quantile(found, 0.9) < REQUESTS


def test_the_confidence_sequence_holds_the_true_fall_at_all_times() -> None:
    missed = 0
    for seed in range(RUNS):
        d, below, above = falls(*run(steady, 0.04, seed), SHARE)
        missed += bet_away(d, below, 0.04, ALPHA / 2) or bet_away(-d, above, -0.04, ALPHA / 2)
    assert missed <= 33


def test_the_bounds_enclose_the_fall_and_close_in() -> None:
    d, below, above = falls(*run(steady, 0.1, 1, 4000), SHARE)
    wide = lower_bound(d[:400], below[:400], ALPHA), -lower_bound(-d[:400], above[:400], ALPHA)
    tight = lower_bound(d, below, ALPHA), -lower_bound(-d, above, ALPHA)
    assert wide[0] <= tight[0] < 0.1 < tight[1] <= wide[1]
    assert tight[1] - tight[0] < 0.2


def test_the_estimate_of_the_fall_is_unbiased_whatever_the_traffic_does() -> None:
    estimates = []
    for seed in range(RUNS):
        generator = np.random.default_rng(seed)
        held = generator.random(1000) < SHARE
        accepted = generator.random(1000) < collapsing(1000, generator) - np.where(held, 0.0, 0.07)
        estimates.append(falls(held, accepted.astype(float), SHARE)[0].mean())
    assert np.mean(estimates) == pytest.approx(0.07, abs=4 * np.std(estimates) / np.sqrt(RUNS))


def test_no_stake_can_ruin() -> None:
    """The most unlucky sequence there is: the held-back do nothing, the others everything."""
    held = np.arange(2000) % 7 == 0
    d, below, above = falls(held, np.where(held, 0.0, 1.0), SHARE)
    assert np.isfinite(capital(d, below, -0.5)).all()
    assert np.isfinite(capital(-d, above, -0.5)).all()


def observations(
    n: int, drop: float, seed: int = 0, workload: str = "code", strayed: bool = False
) -> list[Observation]:
    held, rates = run(steady, drop, seed, n)
    return [
        Observation(workload, "greedy", bool(h), strayed, 40, round(40 * rate), 10 + round(40 * rate), 200.0)
        for h, rate in zip(held, rates, strict=True)
    ]


def test_a_worse_version_is_named_with_its_figures() -> None:
    verdict = judge(observations(2500, 0.15), SHARE, CONFIG)
    assert verdict.state == "worse"
    assert verdict.reason.startswith("worse than the predecessor: acce")
    assert "of code (greedy) 0." in verdict.reason
    assert verdict.reason.endswith("of the other, error rate 0.05")
    worst = next(f for f in verdict.findings if f.figure == "acceptance rate")
    assert worst.predecessor is not None
    assert worst.live is not None
    assert worst.predecessor - worst.live == pytest.approx(0.15, abs=0.05)
    assert 0 <= worst.low < 0.15 < worst.high


def test_a_version_that_is_no_worse_is_safe_in_the_end_and_not_before() -> None:
    assert judge(observations(200, 0.0), SHARE, CONFIG).state == "watching"
    verdict = judge(observations(4000, 0.0), SHARE, CONFIG)
    assert verdict.state == "safe"
    assert verdict.reason.startswith("no fall of 0.05 or more: acceptance rate of code (greedy)")


def test_one_workload_that_falls_among_others_that_do_not_is_enough() -> None:
    both = [
        one
        for pair in zip(observations(2500, 0.0, 1), observations(2500, 0.2, 2, workload="sql"), strict=True)
        for one in pair
    ]
    verdict = judge(both, SHARE, CONFIG)
    assert verdict.state == "worse"
    assert "of sql (greedy)" in verdict.reason


def test_each_workload_has_its_part_of_the_error_rate() -> None:
    mixed = [one for i in range(30) for one in observations(5, 0.0, i, workload=f"w{i}")]
    findings = judge(mixed, SHARE, CONFIG).findings
    assert len(findings) == 60
    assert sum(f.alpha for f in findings) < CONFIG.watch_alpha
    assert findings[0].alpha == pytest.approx(CONFIG.watch_alpha / 4)


def test_where_the_live_version_drafted_for_the_held_back_nothing_is_called_safe() -> None:
    assert judge(observations(4000, 0.0, strayed=True), SHARE, CONFIG).state == "watching"


def test_a_watch_ends_after_its_time_or_its_requests() -> None:
    seen = observations(300, 0.0)
    assert judge(seen, SHARE, CONFIG, hours=24.5).state == "ended"
    assert judge(seen, SHARE, WatchConfig(watch_requests=300)).state == "ended"
    assert judge([], SHARE, CONFIG, hours=25).reason == "after 0 requests no fall was shown, nor ruled out: no requests"


def test_slower_rounds_of_the_live_version_are_found_in_its_progress() -> None:
    seen = [
        Observation(o.workload, o.policy, o.held, False, o.proposed, o.accepted, o.tokens, 200.0 if o.held else 320.0)
        for o in observations(3000, 0.0)
    ]
    verdict = judge(seen, SHARE, CONFIG)
    assert verdict.state == "worse"
    assert "accepted progress of code (greedy)" in verdict.reason


@pytest.mark.parametrize("changes", [{"holdback": 0.6}, {"holdback": -0.1}, {"watch_alpha": 0.0}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        WatchConfig(**changes)
