"""What training, evaluation and the gate say about a candidate: plain frozen records.

The adapter fills them, the registry stores them. They live here so that storage never imports the adapter.
Acceptance probability, rate and length are different quantities (the design's words); k stands beside them.
"""

from dataclasses import dataclass, field
from typing import Any

# What teaches: rows that serving kept, the target in the trainer, which reads again, or a serving engine, off-peak.
LOGGED, RESCORED, ENGINE = "logged", "rescored", "engine"


@dataclass(frozen=True)
class TrainingInputs:
    """What a run of training starts from, by digest: with these files and its settings it can be done again."""

    parent_sha256: str  # the parent's weights
    windows: tuple[tuple[int, str], ...]  # (id, sha256) of those trained on, oldest first; the run's own is the last
    settings_sha256: str  # of the settings, so that a later change of the row is seen
    replayed: tuple[str, ...] = ()  # record ids: what was taken of the windows before its own
    reservoir_sha256: str = ""  # the references that those were drawn from, for the next run to go on with
    moments_sha256: str = ""  # the optimiser's moments that it went on from, the parent's; "": it started anew
    rescored: dict[str, Any] = field(default_factory=dict)  # how the target scored the records again; {}: it did not


@dataclass(frozen=True)
class TrainingReport:
    """One run of distillation; enough to repeat it from its parent and windows."""

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
    inputs: TrainingInputs | None = None  # None: of a run that was not told, or from before they were kept
    machine: dict[str, Any] = field(default_factory=dict)  # what the bits of the result depend on besides
    replayed: int = 0  # of the records, those of earlier windows
    passes: int = 0  # over the records; early stopping may have taken the weights of an earlier one
    set_aside_losses: tuple[float, ...] = ()  # on what was set aside: before the first pass, and after each
    novelty: float | None = None  # the parent's loss on the window / that on replayed records; None: not asked for
    mass_covered: float | None = None  # share of the mass that the window's rows name, inside the draft vocabulary
    tokens_covered: float | None = None  # share of the window's emitted tokens inside the draft vocabulary
    moments_sha256: str = ""  # the optimiser's moments that it left; "": they were not kept
    teacher: str = LOGGED  # or RESCORED or ENGINE: where the target's rows came from


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
class RoundCosts:
    """What a round of requests at draft length k takes where the drafter is served."""

    k: int
    rounds: int  # measured
    draft_ms: float  # a round
    verify_ms: float  # a round

    @property
    def ms(self) -> float:
        return self.draft_ms + self.verify_ms

    def progress(self, length: float) -> float:
        """Accepted progress, in tokens a millisecond, of rounds with this acceptance length."""
        return length / self.ms


@dataclass(frozen=True)
class Decision:
    """The gate's answer; the reason is a sentence with the rule, the value, the interval and n."""

    promote: bool
    reason: str
