"""How each arm of `redraft bench adapt` learns: the settings of an update, or none.

`redraft` is this process's own settings. `frozen` keeps version 1. `osd` is Online Speculative Decoding as published
(arXiv 2310.07177, the shipped scripts for single workloads): forward KL at rejected positions alone, one step of a
constant rate after every eight requests, an optimiser that goes on, no clipping, no replay, and nothing between a
step and serving. `osd_tuned` learns from the same positions in the same way, but with our rate, windows and passes.
`LOSS/POSITIONS` is `redraft` with these two.
"""

from dataclasses import replace
from typing import get_args

from adapter.batch import Positions
from adapter.distil import DistilConfig
from adapter.gate import GateConfig
from adapter.loss import LOSSES, LossName
from adapter.watch import WatchConfig
from worker.config import TriggerConfig
from worker.pipeline import AdaptConfig

FROZEN, OSD, OSD_TUNED, REDRAFT, OFFLINE = "frozen", "osd", "osd_tuned", "redraft", "offline"
NAMED = (FROZEN, OSD, OSD_TUNED, REDRAFT, OFFLINE)
NEVER = 10**9
ALWAYS_PROMOTE = GateConfig(margin=-2.0, tolerance=2.0, minimum_requests=0)  # no gain is as low as -2
INTERVAL = 8  # requests between two steps of OSD
PUBLISHED = DistilConfig(
    loss="forward_kl",
    positions="rejected",
    accepted_weight=0.0,
    learning_rate=1e-4,
    novelty_range=1.0,
    epochs=1,
    stopping_share=0.0,
    batch_tokens=NEVER,  # one step
    packing=False,
    weight_decay=0.0,
    carry_moments=True,
    clip=1e9,
    warm_up=0.0,  # with one step, the rate is constant
    max_context=512,
    replay_records=0,
)
OFFLINE_PASSES, OFFLINE_PATIENCE, OFFLINE_SHARE = 12, 2, 0.15


class UnknownArm(ValueError):
    """No arm has this name."""


def adapting(arm: str, ours: AdaptConfig) -> AdaptConfig:
    """The settings of an arm that meets traffic; `ours` are redraft's."""
    ours = replace(ours, watch=WatchConfig(holdback=0.0))  # every request is the live version's
    if arm == REDRAFT:
        return ours
    if arm == FROZEN:
        return replace(ours, trigger=replace(ours.trigger, window_records=NEVER, window_minimum=NEVER))
    if arm == OSD:
        return AdaptConfig(_unguarded(ours.trigger, INTERVAL), PUBLISHED, ALWAYS_PROMOTE, ours.watch)
    if arm == OSD_TUNED:
        taught = replace(ours.distil, loss="forward_kl", positions="rejected", accepted_weight=0.0, replay_records=0)
        trigger = _unguarded(ours.trigger, ours.trigger.window_records)
        return AdaptConfig(trigger, taught, ALWAYS_PROMOTE, ours.watch)
    loss, positions = cell(arm)
    return replace(ours, distil=replace(ours.distil, loss=loss, positions=positions))


def offline(ours: DistilConfig) -> DistilConfig:
    """How the ceiling is trained: on everything, until what is set aside becomes no better."""
    return replace(
        ours,
        positions="verified",
        epochs=OFFLINE_PASSES,
        patience=OFFLINE_PATIENCE,
        stopping_share=OFFLINE_SHARE,
    )


def cell(name: str) -> tuple[LossName, Positions]:
    """The loss and the positions that `LOSS/POSITIONS` names; raises `UnknownArm`."""
    for loss in LOSSES:
        for positions in get_args(Positions):
            if name == f"{loss}/{positions}":
                return loss, positions
    raise UnknownArm(
        f"{name!r} is no arm: use {', '.join(NAMED)}, or LOSS/POSITIONS with a loss of {', '.join(LOSSES)} and "
        f"positions of {', '.join(get_args(Positions))}"
    )


def check(arms: tuple[str, ...]) -> None:
    """Raises `UnknownArm`."""
    for arm in arms:
        if arm not in NAMED:
            cell(arm)


def _unguarded(trigger: TriggerConfig, records: int) -> TriggerConfig:
    """Every so many requests, whatever they are; all of them are trained on."""
    return replace(
        trigger,
        window_records=records,
        window_minimum=1,
        window_age_seconds=float(NEVER),
        drift_trigger=False,
        window_copies=NEVER,
        window_share=1.0,
        holdout_share=0.0,
    )
