"""Making a version again from its lineage, and comparing: the same bits, or what differs.

The row of its training run names all that it started from. Nothing is written, so this may run beside serving and
learning; with `restore`, weights that were deleted for their age and come out the same are put back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any

import torch

from adapter import moments
from adapter.distil import DistilConfig, Distilled, TrainingFailed
from adapter.distributed import DistributedConfig, launch
from adapter.drafters.learnt import LearntDrafter
from adapter.machine import Machine, machine
from adapter.versions import Versions, WeightsRefused
from storage import marks
from storage.decisions import TrainingInputs, TrainingReport
from storage.registry import Drafter, Registry, Version
from storage.rewritten import purged_windows
from storage.weights import BlobDamaged
from storage.windows import Windows
from worker.lineage import TargetNeeded, digest_of, gathered, taught, trained
from worker.rescoring import Load, Rescorer

IDENTICAL, DIFFERENT, IMPOSSIBLE = "identical", "different", "impossible"


@dataclass(frozen=True)
class Reproduction:
    """How it went."""

    drafter: str
    version: int
    outcome: str  # identical, different, impossible
    sha256: str  # of the version's weights, as the registry has it
    rebuilt_sha256: str | None  # of the weights that came out; None where nothing did
    differences: tuple[str, ...]  # in sentences: what stood in the way, or what is not as it was
    restored: bool = False


class Impossible(RuntimeError):
    """A version cannot be made again; each argument is a reason, in a sentence."""


@dataclass(frozen=True)
class Lineage:
    """Where versions and what they were made from are kept."""

    registry: Registry
    windows: Windows
    weights: Versions
    load: Load | None = None  # the target, where a run had records scored again


def reproduce(lineage: Lineage, drafter: Drafter, number: int, restore: str = "") -> Reproduction:
    """Train version `number` again as its row says, and compare the sha256 of the weights.

    It is done with as many threads and processes as the run had, and the target scores records again where it did.

    `restore` names the actor on whose behalf weights that come out the same are stored again.
    """
    version = lineage.registry.version(drafter.name, number)
    made = Reproduction(drafter.name, number, IMPOSSIBLE, version.weights_sha256, None, ())
    try:
        run, names = _run(lineage.registry, version)
        config = _config(run)
        parent = _parent(lineage, version, names)
        present = _as_they_are(lineage.windows, version, names)
        with _threads(run.machine.get("threads")):
            by = _processes(run)
            here = machine(by.trainer_processes, by.trainer_sharded)
            inputs = gathered(present, drafter, parent, lineage.windows, lineage.weights)
            inputs = taught(inputs, config, _rescorer(lineage, names))
            again = trained(inputs, config, launch=launch(lineage.weights, lineage.windows.blobs, by))
    except Impossible as reasons:
        return replace(made, differences=reasons.args)
    except (BlobDamaged, WeightsRefused, TargetNeeded, TrainingFailed) as error:
        return replace(made, differences=(str(error),))
    data = lineage.weights.packed(again.student)
    made = replace(made, rebuilt_sha256=sha256(data).hexdigest())
    if made.rebuilt_sha256 == version.weights_sha256:
        return replace(
            made, outcome=IDENTICAL, restored=bool(restore) and _restore(lineage, version, run, again, restore)
        )
    found = (*_changed(run, names, here), *_weights_apart(lineage.weights, drafter, version, again.student))
    return replace(made, outcome=DIFFERENT, differences=found)


def _run(registry: Registry, version: Version) -> tuple[TrainingReport, TrainingInputs]:
    run = registry.training(version)
    if run is None:
        raise Impossible(f"version {version.number} was made by `redraft init`, not trained on traffic")
    if run.inputs is None:
        raise Impossible("its training run is from before redraft kept what a run starts from")
    return run, run.inputs


def _config(run: TrainingReport) -> DistilConfig:
    """The settings of the run; those that did not exist then have their defaults."""
    known = {f.name for f in fields(DistilConfig)}
    if strange := sorted(run.config.keys() - known):
        raise Impossible(f"its training run had settings that this redraft does not know: {', '.join(strange)}")
    return DistilConfig(**run.config)


def _processes(run: TrainingReport) -> DistributedConfig:
    """How many shared the run, and how: gradients of parts of a batch are summed in another order."""
    known = run.machine.get("processes", 1), run.machine.get("sharded", False)
    return DistributedConfig(trainer_processes=int(known[0]), trainer_sharded=bool(known[1]))


def _parent(lineage: Lineage, version: Version, names: TrainingInputs) -> Version:
    """The parent as the run had it; its weights must still be there."""
    assert version.parent is not None, "a trained version has a parent"
    summaries = {s.version.number: s for s in lineage.registry.versions(version.drafter)}
    parent = summaries[version.parent]
    if parent.weights_deleted:
        raise Impossible(
            f"the weights of its parent, version {version.parent}, were deleted for their age: "
            f"`redraft reproduce {version.parent} --restore` makes them again"
        )
    return replace(parent.version, weights_sha256=names.parent_sha256)


def _as_they_are(windows: Windows, version: Version, names: TrainingInputs) -> TrainingInputs:
    """The names, with those files that a purge replaced without taking anything that this run read.

    All that is not there as the run read it is said, with why.
    """
    purges = purged_windows(windows.engine, [window_id for window_id, _ in names.windows])
    found, reasons = [], []
    for window_id, digest in names.windows:
        window = windows.window(window_id)
        taken = [p for p in purges if p.window == window_id]
        found.append((window_id, window.sha256))
        if window.deleted:
            reasons.append(f"window {window_id} was deleted for its age")
        elif window.sha256 != digest and (not taken or taken[-1].after_sha256 != window.sha256):
            reasons.append(f"window {window_id} is not the one that the run read: its row names another file")
        reasons += [
            f"{p.trained[version.id]} of the records that it learnt from window {window_id} were purged on "
            f"{p.at:%F %T} UTC, with all of tenant {p.tenant}"
            for p in taken
            if p.trained.get(version.id)
        ]
    if reasons:
        raise Impossible(*reasons)
    return replace(names, windows=tuple(found))


@contextmanager
def _threads(count: Any) -> Iterator[None]:
    """As many torch threads as the run had: sums of floats depend on how they are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(count or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rescorer(lineage: Lineage, names: TrainingInputs) -> Rescorer | None:
    """Reads the records again as the run did; None where it learnt from logged rows."""
    if not names.rescored:
        return None
    if lineage.load is None:
        raise Impossible("its records were scored again by the target, which is not given here")
    return Rescorer.again(lineage.load, names.rescored)


def _restore(lineage: Lineage, version: Version, run: TrainingReport, again: Distilled, actor: str) -> bool:
    """Store the weights again, and the moments that children went on from, and take the mark away.

    The files first, so that a crash leaves the weights deleted.
    """
    lineage.weights.save(again.student)
    if run.moments_sha256:
        lineage.windows.blobs.put(moments.to_bytes(again.moments))
    marks.restored(lineage.registry.engine, version.drafter, version.number, actor)
    return True


def _changed(run: TrainingReport, names: TrainingInputs, here: Machine) -> Iterator[str]:
    """What is not as it was when the version was made."""
    if digest_of(run.config) != names.settings_sha256:
        yield "the settings in the training row are not those that the run had: the row was changed"
    missing = sorted({f.name for f in fields(DistilConfig)} - run.config.keys())
    if missing:
        yield f"settings that the run did not know had their defaults: {', '.join(missing)}"
    then, now = run.machine, asdict(here)
    apart = [f"{name} was {then[name]}, is {now[name]}" for name in now if name in then and then[name] != now[name]]
    yield from apart
    if not apart:
        yield "torch, CPU and threads are as they were: the code of training may have changed"


def _weights_apart(weights: Versions, drafter: Drafter, version: Version, rebuilt: LearntDrafter) -> Iterator[str]:
    """How far the stored weights are from those that came out."""
    try:
        stored = weights.load(version, drafter).own_tensors()
    except (BlobDamaged, WeightsRefused) as error:
        yield f"the stored weights cannot be compared: {error}"
        return
    gaps = {name: (tensor - stored[name]).abs().max().item() for name, tensor in rebuilt.own_tensors().items()}
    apart = {name: gap for name, gap in gaps.items() if gap > 0}
    if apart:
        widest = max(apart, key=lambda name: apart[name])
        yield f"{len(apart)} of {len(gaps)} tensors differ, by {apart[widest]:.2g} at most ({widest})"
    else:
        yield "the stored weights are equal to those that came out, but the registry's sha256 is another"
