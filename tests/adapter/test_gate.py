"""The interval of the gain, and the gate's decisions with their reasons."""

from dataclasses import replace

import numpy as np
import pytest

from adapter.bootstrap import paired_gain, student
from adapter.gate import GateConfig, decide
from storage.decisions import Evaluation, RoundCosts, WorkloadScore

GAINED = WorkloadScore("all", "greedy", 12, 1140, 0.142, 0.231, 1.16, 1.29, 0.089, 0.071, 0.108)


def evaluation(overall: WorkloadScore, *scores: WorkloadScore) -> Evaluation:
    return Evaluation(k=4, requests=overall.requests, scores=scores, overall=overall)


def test_a_sure_gain_is_promoted_with_its_figures() -> None:
    decision = decide(evaluation(GAINED), GateConfig())
    assert decision.promote
    assert decision.reason == (
        "promoted: acceptance probability (greedy) 0.142 -> 0.231, gain 0.089 [0.071, 0.108], 12 requests, "
        "enough to find a gain of 0.025 four times in five"
    )


def test_with_the_costs_of_a_round_accepted_progress_is_stated() -> None:
    costs = RoundCosts(k=4, rounds=812, draft_ms=4.0, verify_ms=16.0)
    reason = decide(evaluation(GAINED), GateConfig(), costs).reason
    assert "accepted progress 0.0580 -> 0.0645 tokens/ms at k=4, with 20.0 ms a round as measured in 812" in reason
    sampled = replace(GAINED, policy="sampled")
    assert "progress" not in decide(evaluation(sampled), GateConfig(), costs).reason


def test_a_gain_that_may_be_chance_is_refused() -> None:
    decision = decide(evaluation(replace(GAINED, gain=0.01, gain_low=-0.002, gain_high=0.02)), GateConfig())
    assert not decision.promote
    assert decision.reason.startswith("refused: the gain is not surely above the margin 0.000: acceptance probability")
    assert "gain 0.010 [-0.002, 0.020], 12 requests" in decision.reason


def test_the_lower_bound_must_be_above_the_margin_and_not_at_it() -> None:
    assert not decide(evaluation(GAINED), GateConfig(margin=0.071)).promote
    assert decide(evaluation(GAINED), GateConfig(margin=0.070)).promote


def test_a_workload_that_falls_too_far_refuses_the_gain_of_the_others() -> None:
    sql = replace(GAINED, workload="sql", requests=9, gain=-0.05)
    decision = decide(evaluation(GAINED, replace(GAINED, workload="chat"), sql), GateConfig())
    assert not decision.promote
    assert decision.reason == (
        "refused: workload sql (greedy) fell by 0.050, more than the tolerance 0.030, 9 requests"
    )


def test_of_workloads_with_few_requests_only_their_policy_as_a_whole_is_judged() -> None:
    few = [replace(GAINED, workload=f"w{i}", policy="sampled", requests=3, gain=-0.05) for i in range(4)]
    assert decide(evaluation(GAINED, GAINED, few[0]), GateConfig()).promote
    decision = decide(evaluation(GAINED, GAINED, *few), GateConfig())
    assert decision.reason.startswith("refused: workload all (sampled) fell by 0.050")
    assert decision.reason.endswith("12 requests")


def test_a_workload_may_fall_within_the_tolerance() -> None:
    sql = replace(GAINED, workload="sql", gain=-0.03)
    assert decide(evaluation(GAINED, sql), GateConfig(tolerance=0.03)).promote


def test_too_few_requests_decide_nothing() -> None:
    decision = decide(evaluation(replace(GAINED, requests=7)), GateConfig(minimum_requests=8))
    assert not decision.promote
    assert decision.reason == "refused: 7 greedy holdout requests are too few, 8 are needed"


def test_the_interval_holds_the_gain_and_widens_with_confidence() -> None:
    generator = np.random.default_rng(0)
    parent = generator.uniform(10, 30, size=20)
    sums = np.stack([np.full(20, 95.0), parent, parent + generator.normal(5, 8, size=20)], axis=1)
    gain = float((sums[:, 2] - sums[:, 1]).sum() / sums[:, 0].sum())
    low, high = paired_gain(sums, 0.95, seed=0)
    wide_low, wide_high = paired_gain(sums, 0.999, seed=0)
    assert wide_low < low < gain < high < wide_high


def test_the_interval_is_as_wide_as_theory_says() -> None:
    """Requests of equal length: the standard error of a mean, to the bootstrap's own precision."""
    generator = np.random.default_rng(1)
    gains = generator.normal(0.05, 0.1, size=200)
    sums = np.stack([np.full(200, 100.0), np.full(200, 30.0), 30.0 + 100 * gains], axis=1)
    low, high = paired_gain(sums, 0.95, seed=0)
    assert (high - low) / 2 == pytest.approx(1.96 * gains.std() / np.sqrt(200), rel=0.1)


def test_the_same_seed_gives_the_same_interval() -> None:
    sums = np.array([[10.0, 2.0, 5.0], [10.0, 3.0, 1.0], [20.0, 8.0, 9.0]])
    assert paired_gain(sums, 0.95, seed=4) == paired_gain(sums, 0.95, seed=4)


def test_positions_of_one_request_are_not_independent() -> None:
    """The same positions in fewer, longer requests say less: the interval is wider."""
    few = np.array([[200.0, 40.0, 60.0 if i % 2 else 30.0] for i in range(10)])
    many = np.repeat(few / 10, 10, axis=0)
    (few_low, few_high), (many_low, many_high) = (paired_gain(s, 0.95, seed=0) for s in (few, many))
    assert few_high - few_low > 2 * (many_high - many_low)


@pytest.mark.parametrize("freedom", [3, 7, 12, 50, 500])
def test_students_quantile_is_that_of_the_tables(freedom: int) -> None:
    from scipy.stats import t

    for confidence in (0.8, 0.95):
        assert student(confidence, freedom) == pytest.approx(t.ppf((1 + confidence) / 2, freedom), rel=0.01)


def test_one_request_says_nothing() -> None:
    assert paired_gain(np.array([[10.0, 2.0, 9.0]]), 0.95, seed=0) == (-1.0, 1.0)
