"""What a run of training starts from: chosen once, named in the training row, gathered from the names alone.

A new run (`worker/pipeline`) and the repetition of an old one (`worker/reproduce`) both go through `gathered`, so
that the second cannot differ from the first in what it reads or in which order.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

import structlog

from adapter import moments
from adapter.distil import DistilConfig, Distilled, Lesson, distil
from adapter.drafters.causal_lm import CausalLM
from adapter.machine import machine
from adapter.versions import Versions
from storage.decisions import TrainingInputs
from storage.registry import Drafter, Registry, Version
from storage.windows import Window, Windows
from worker.reservoir import replay

log = structlog.get_logger()


@dataclass(frozen=True)
class Gathered:
    """All that a run reads, in memory."""

    names: TrainingInputs
    parent: CausalLM
    lesson: Lesson


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
    return Gathered(names, loaded, lesson)


def trained(inputs: Gathered, config: DistilConfig, should_stop: Callable[[], None] = lambda: None) -> Distilled:
    """The student, and the run's report with all that is needed to do it again. Raises `TrainingFailed`."""
    made = distil(inputs.parent, inputs.lesson, config, should_stop)
    return replace(made, report=replace(made.report, machine=asdict(machine())))


def digest_of(settings: dict[str, Any]) -> str:
    """Of a run's settings, as the training row keeps them."""
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
