"""The gate: whether a candidate goes live, and the sentence that says why."""

from dataclasses import dataclass

from storage.config import setting
from storage.decisions import Decision, Evaluation, WorkloadScore


@dataclass(frozen=True)
class GateConfig:
    """What a candidate must show on traffic that it was not trained on."""

    margin: float = setting(0.0, "what the lower bound of the gain in acceptance probability must exceed")
    tolerance: float = setting(0.03, "largest fall of acceptance probability that one workload may suffer")
    confidence: float = setting(0.95, "confidence of the two-sided interval of the gain")
    minimum_requests: int = setting(8, "holdout requests that a decision needs at least")


def decide(evaluation: Evaluation, config: GateConfig) -> Decision:
    """Promote where the whole holdout's gain is surely above the margin and no workload falls too far."""
    overall = evaluation.overall
    if evaluation.requests < config.minimum_requests:
        return _refused(f"{evaluation.requests} holdout requests are too few, {config.minimum_requests} are needed")
    if overall.gain_low <= config.margin:
        return _refused(
            f"acceptance probability {_change(overall)} is not surely above the margin {config.margin:.3f}, "
            f"{evaluation.requests} requests"
        )
    fallen = [score for score in evaluation.scores if score.gain < -config.tolerance]
    if fallen:
        worst = min(fallen, key=lambda score: score.gain)
        return _refused(
            f"workload {worst.workload} ({worst.policy}) fell by {-worst.gain:.3f}, more than the tolerance "
            f"{config.tolerance:.3f}, {worst.requests} requests"
        )
    return Decision(True, f"promoted: acceptance probability {_change(overall)}, {evaluation.requests} requests")


def _refused(why: str) -> Decision:
    return Decision(False, f"refused: {why}")


def _change(score: WorkloadScore) -> str:
    return (
        f"{score.parent_probability:.3f} -> {score.candidate_probability:.3f}, "
        f"gain {score.gain:.3f} [{score.gain_low:.3f}, {score.gain_high:.3f}]"
    )
