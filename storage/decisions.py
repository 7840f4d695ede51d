"""What training, evaluation and the gate say about a candidate: plain frozen records.

The adapter fills them, the registry stores them. They live here so that storage never imports the adapter.
Acceptance probability, rate and length are different quantities (the design's words); k stands beside them.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingReport:
    """One run of distillation; enough to repeat it from its parent and window."""

    seed: int
    config: dict[str, Any]
    records: int
    positions: int
    steps: int
    first_loss: float
    last_loss: float
    seconds: float
    outcome: str  # "trained" or "failed"
    reason: str


@dataclass(frozen=True)
class WorkloadScore:
    """Parent and candidate on the same holdout requests; gains are in acceptance probability."""

    workload: str
    policy: str  # "greedy" or "sampled"
    requests: int
    positions: int
    parent_probability: float  # mean over positions of sum(min(p, q))
    candidate_probability: float
    parent_length: float  # acceptance length at the evaluation's k
    candidate_length: float
    gain: float
    gain_low: float
    gain_high: float


@dataclass(frozen=True)
class Evaluation:
    """Paired scores of one candidate, per workload and over all of them, at draft length k."""

    k: int
    requests: int
    scores: tuple[WorkloadScore, ...]
    overall: WorkloadScore


@dataclass(frozen=True)
class Decision:
    """The gate's answer; the reason is a sentence with the rule, the value, the interval and n."""

    promote: bool
    reason: str
