"""The gate: whether a candidate goes live, and the sentence that says why.

The rule, in this order:
1. The policy that most holdout requests have (greedy or sampled, never mixed) decides, if it has enough of them.
2. No workload with enough requests, and no policy as a whole, may fall by more than the tolerance.
3. The gain over the deciding policy's workloads, each counting by its requests, must surely be above the margin.
Without a true gain over the margin a candidate passes the third with a chance of at most (1 - confidence) / 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from adapter.bootstrap import detectable
from storage.config import setting
from storage.decisions import Decision, Evaluation, RoundCosts, WorkloadScore


@dataclass(frozen=True)
class GateConfig:
    """What a candidate must show on traffic that it was not trained on."""

    margin: float = setting(0.0, "what the lower bound of the gain in acceptance probability must exceed")
    tolerance: float = setting(0.03, "largest fall of acceptance probability that one workload may suffer")
    confidence: float = setting(0.95, "confidence of the two-sided interval of the gain")
    minimum_requests: int = setting(8, "holdout requests that a decision, or the fall of a workload, needs at least")


def decide(evaluation: Evaluation, config: GateConfig, costs: RoundCosts | None = None) -> Decision:
    """The gate's answer; with the serving side's costs of a round at the evaluation's k, progress is stated too."""
    overall = evaluation.overall
    if overall.requests < config.minimum_requests:
        return _refused(
            f"{overall.requests} {overall.policy} holdout requests are too few, {config.minimum_requests} are needed"
        )
    fallen = [s for s in _judged(evaluation.scores, config) if s.gain < -config.tolerance]
    if fallen:
        worst = min(fallen, key=lambda score: score.gain)
        return _refused(
            f"workload {worst.workload} ({worst.policy}) fell by {-worst.gain:.3f}, more than the tolerance "
            f"{config.tolerance:.3f}, {worst.requests} requests"
        )
    figures = _figures(evaluation, config, costs)
    if overall.gain_low <= config.margin:
        return _refused(f"the gain is not surely above the margin {config.margin:.3f}: {figures}")
    return Decision(True, f"promoted: {figures}")


def _refused(why: str) -> Decision:
    return Decision(False, f"refused: {why}")


@dataclass(frozen=True)
class Total:
    """All workloads of one policy, each counting by its requests."""

    policy: str
    requests: int
    gain: float
    workload: str = "all"


def _judged(scores: Sequence[WorkloadScore], config: GateConfig) -> list[WorkloadScore | Total]:
    """What may not fall: each workload and each policy with enough requests."""
    found: list[WorkloadScore | Total] = list(scores)
    for policy in sorted({score.policy for score in scores}):
        same = [score for score in scores if score.policy == policy]
        requests = sum(score.requests for score in same)
        found.append(Total(policy, requests, sum(score.requests * score.gain for score in same) / requests))
    return [one for one in found if one.requests >= config.minimum_requests]


def _figures(evaluation: Evaluation, config: GateConfig, costs: RoundCosts | None) -> str:
    score = evaluation.overall
    least = detectable(score.gain_low, score.gain_high, score.requests, config.confidence)
    sentence = (
        f"acceptance probability ({score.policy}) {score.parent_probability:.3f} -> "
        f"{score.candidate_probability:.3f}, gain {score.gain:.3f} [{score.gain_low:.3f}, {score.gain_high:.3f}], "
        f"{score.requests} requests, enough to find a gain of {config.margin + least:.3f} four times in five"
    )
    if costs is None or score.policy != "greedy":
        return sentence
    return (
        f"{sentence}; accepted progress {costs.progress(score.parent_length):.4f} -> "
        f"{costs.progress(score.candidate_length):.4f} tokens/ms at k={costs.k}, with {costs.ms:.1f} ms a round as "
        f"measured in {costs.rounds} rounds"
    )
