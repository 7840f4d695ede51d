"""When the worker acts, and how much of the machine it takes."""

from dataclasses import dataclass
from typing import Literal

from storage.config import setting


@dataclass(frozen=True)
class TriggerConfig:
    """An update starts when enough feedback waits, when some has waited for long enough, or after a drift alarm."""

    window_records: int = setting(32, "feedback records that start an update, and that one update reads at most")
    window_age_seconds: float = setting(900.0, "age of the oldest waiting record that starts an update as well")
    window_minimum: int = setting(16, "records below which neither age nor drift starts an update")
    drift_trigger: bool = setting(True, "an alarm that a workload's acceptance has fallen starts an update as well")
    window_copies: int = setting(3, "copies of one prompt with the same output that a window keeps; more are left out")
    window_share: float = setting(
        0.75, "largest share of a window for one workload or one tenant, where there are others"
    )
    holdout_share: float = setting(
        0.2, "share of requests, by hash of their id, kept for the gate and never trained on"
    )
    draft_length: int = setting(4, "k: tokens proposed a round at most; 0 for plain decoding")
    holdout_windows: int = setting(4, "recent windows whose holdout the gate scores")


@dataclass(frozen=True)
class LineageConfig:
    """What becomes of a drafter whose target has changed."""

    new_lineage: Literal["off", "auto"] = setting(
        "off",
        "when a drafter's target has changed: off, its adaptation stops; auto, and a drafter for the new target, with "
        "the same tokenizer, goes on from its live weights",
    )


@dataclass(frozen=True)
class TrainerConfig:
    """How the trainer and the housekeeper run."""

    trainer_threads: int = setting(1, "torch threads of the trainer")
    trainer_device: str = setting("cpu", "device that drafters are trained on: cpu or cuda")
    trainer_nice: int = setting(10, "niceness of the trainer, so that serving goes first")
    lease_seconds: float = setting(30.0, "a trainer that is silent for so long has lost its job to the next one")
    sweep_seconds: float = setting(5.0, "interval of looking for due updates, lost doorbells and unsent messages")
    fold_seconds: float = setting(5.0, "interval of folding feedback into the acceptance history")
    watch_seconds: float = setting(5.0, "interval of judging a version that was just promoted")
