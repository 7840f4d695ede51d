"""What a run of training starts from: chosen once, named in the training row, gathered from the names alone.

A new run (`worker/pipeline`) and the repetition of an old one (`worker/reproduce`) both go through `gathered`,
`taught` and `trained`, so that the second cannot differ from the first in what it reads or in which order.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

import structlog

from adapter import moments
from adapter.distil import DistilConfig, Distilled, Lesson, TrainingFailed, distil
from adapter.distributed import DistributedConfig, Launch
from adapter.drafters.learnt import LearntDrafter
from adapter.machine import machine
from adapter.versions import Versions
from storage.decisions import LOGGED, RESCORED, TrainingInputs, TrainingReport
from storage.registry import Drafter, Registry, Version
from storage.validation import contradicted
from storage.windows import Window, Windows
from worker.rescoring import Rescorer
from worker.reservoir import replay

ODD_SHARE = 0.02  # of greedy tokens: engine and trainer round differently, mostly at near-ties

log = structlog.get_logger()


@dataclass(frozen=True)
class Gathered:
    """All that a run reads, in memory."""

    names: TrainingInputs
    drafter: Drafter
    version: Version  # that `parent` is
    parent: LearntDrafter
    lesson: Lesson
    teacher: str = LOGGED  # or RESCORED or ENGINE: where the target's rows came from


class TargetNeeded(RuntimeError):
    """Records cannot be read again without the target."""


def chosen(
    parent: Version, window: Window, windows: Windows, registry: Registry, config: DistilConfig
) -> TrainingInputs:
    """What a new run starts from: the window, and what the reservoir gives of earlier ones."""
    again = replay(window, windows, config)
    return TrainingInputs(
        parent_sha256=parent.weights_sha256,
        windows=tuple((w.id, w.sha256) for w in (*again.windows, window)),
        settings_sha256=digest_of(asdict(config)),
        replayed=again.records,
        reservoir_sha256=again.reservoir_sha256,
        moments_sha256=_carried(parent, windows, registry) if config.carry_moments else "",
    )


def _carried(parent: Version, windows: Windows, registry: Registry) -> str:
    """The moments that the parent's run left; "" where it left none, or their file is gone."""
    run = registry.training(parent)
    if run is None or not run.moments_sha256:
        return ""
    if not windows.blobs.has(run.moments_sha256):
        log.warning("moments.gone", parent=parent.number, sha256=run.moments_sha256)
        return ""
    return run.moments_sha256


def gathered(names: TrainingInputs, drafter: Drafter, parent: Version, windows: Windows, weights: Versions) -> Gathered:
    """What the names say; raises the store's `BlobDamaged` where a file is gone or is not what it was."""
    *earlier, own = (
        windows.records(replace(windows.window(window_id), sha256=digest)).training
        for window_id, digest in names.windows
    )
    again = set(names.replayed)
    loaded = weights.load(parent, drafter)
    lesson = Lesson(
        window=own,
        replay=[record for records in earlier for record in records if record.record_id in again],
        moments=moments.from_bytes(windows.blobs.get(names.moments_sha256), loaded) if names.moments_sha256 else None,
        inputs=names,
    )
    return Gathered(names, drafter, parent, loaded, lesson)


def taught(
    inputs: Gathered, config: DistilConfig, rescorer: Rescorer | None, should_stop: Callable[[], None] = lambda: None
) -> Gathered:
    """The inputs with the records as the target reads them again, where settings or the drafter ask for that."""
    taps = inputs.parent.taps
    if rescorer is None or not rescorer.is_needed(taps):
        if taps:
            raise TargetNeeded("this drafter learns from hidden states, and there is no target here to give them")
        return inputs
    lesson, names = inputs.lesson, replace(inputs.names, rescored=rescorer.how())
    read = rescorer.read([*lesson.window, *lesson.replay], taps, config.positions, config.max_context, should_stop)
    window, again = read.records[: len(lesson.window)], read.records[len(lesson.window) :]
    lesson = replace(lesson, window=window, replay=again, hidden=read.hidden, inputs=names)
    return replace(inputs, names=names, lesson=lesson, teacher=RESCORED)


def check_text(inputs: Gathered, config: DistilConfig) -> None:
    """Raise `TrainingFailed` where the target, asked again, would not have said what greedy requests were answered.

    Then the engine serves other weights than the trainer's, or verifies lossily, and says neither.
    """
    if not inputs.names.rescored:
        return  # rows and text came from one engine, and were validated together
    looked = [contradicted(record) for record in inputs.lesson.window]
    tokens, odd = (sum(figures) for figures in zip(*looked, strict=True)) if looked else (0, 0)
    if odd <= max(2.0, ODD_SHARE * tokens):
        return
    reason = (
        f"{odd} of {tokens} greedy tokens are not what this target would have said: the engine serves other weights, "
        "or verifies lossily. See `redraft hosts`, and that REDRAFT_TARGET is what the engine serves"
    )
    nothing = float("nan")
    report = TrainingReport(
        config.seed, asdict(config), len(looked), 0, 0, nothing, nothing, 0.0, "failed", reason, inputs.names
    )
    raise TrainingFailed(_told(report, inputs, None))


def trained(
    inputs: Gathered,
    config: DistilConfig,
    should_stop: Callable[[], None] = lambda: None,
    launch: Launch | None = None,
) -> Distilled:
    """The student, and the run's report with all that is needed to do it again. Raises `TrainingFailed`.

    `launch` has several processes do it; without one it is done here.
    """
    parent, lesson = inputs.parent, inputs.lesson
    try:
        if launch is None:
            made = distil(parent, lesson, config, should_stop)
        else:
            made = launch.distil(inputs.drafter, inputs.version, parent, lesson, config, should_stop)
    except TrainingFailed as failure:
        raise TrainingFailed(_told(failure.report, inputs, launch)) from failure
    return replace(made, report=_told(made.report, inputs, launch))


def _told(report: TrainingReport, inputs: Gathered, launch: Launch | None) -> TrainingReport:
    """The report with what distillation itself does not know."""
    by = launch.config if launch else DistributedConfig()
    here = machine(by.trainer_processes, by.trainer_sharded)
    return replace(report, machine=asdict(here), teacher=inputs.teacher)


def digest_of(settings: dict[str, Any]) -> str:
    """Of a run's settings, as the training row keeps them."""
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
