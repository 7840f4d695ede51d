"""Distributed distillation with two Gloo processes: one process's weights, and no end that is not said."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from adapter.distil import DistilConfig, Distilled, Lesson, TrainingFailed, distil
from adapter.distributed import TRIES, DistributedConfig, Launch, launch
from adapter.distributed_child import OwnerGone, _check
from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import LearntDrafter
from adapter.rescore import rescore
from adapter.target import Target
from adapter.versions import Versions
from storage.config import SettingError, read
from storage.records import FeedbackRecord
from storage.views import Drafter, Version
from storage.weights import WeightsStore
from tests.adapter.feedback import served
from tests.waiting import until

CONFIG = DistilConfig(epochs=3, learning_rate=3e-3, batch_tokens=128, stopping_share=0.2, patience=3)
TOLERANCE = 1e-5  # of a weight, which learning moves by a thousand times as much


@dataclass
class Stored:
    """A tiny drafter in a weights store, and what it is to learn from."""

    store: WeightsStore
    versions: Versions
    drafter: Drafter
    version: Version
    lesson: Lesson

    @property
    def parent(self) -> LearntDrafter:
        return self.versions.load(self.version, self.drafter)

    def distil(
        self, config: DistilConfig = CONFIG, sharded: bool = False, should_stop: Callable[[], None] = lambda: None
    ) -> Distilled:
        by = launch(self.versions, self.store, DistributedConfig(trainer_processes=2, trainer_sharded=sharded))
        assert by is not None
        return by.distil(self.drafter, self.version, self.parent, self.lesson, config, should_stop)


@pytest.fixture
def stored(target: Target, answered: list[FeedbackRecord], tmp_path: Path) -> Stored:
    """Of the target's first two layers."""
    return store_of(target, answered, tmp_path, "causal_lm")


def store_of(target: Target, answered: list[FeedbackRecord], folder: Path, kind: str) -> Stored:
    """With moments to go on from, and sets of records that two cannot share evenly."""
    store = WeightsStore(folder / "weights")
    versions = Versions(store, target.files, target.embedding)
    first = first_version(kind, target.model, versions.shared, torch.arange(200), Sizes(layers=2, depths=2))
    now, files = datetime.now(UTC), target.files
    blob = versions.save(first)
    config = first.config.to_dict()
    drafter = Drafter(1, "demo", kind, files.fingerprint, files.tokenizer_fingerprint, config, now, None)
    version = Version(1, "demo", 1, None, blob.sha256, blob.size, now, None)
    traffic = [served(CausalLM.from_target(target.model, 1, torch.arange(200)), answer) for answer in answered]
    read = rescore(target, traffic, first.taps, max_context=CONFIG.max_context) if first.taps else ()
    hidden = {found.record.record_id: found.hidden for found in read if found.hidden is not None}
    begun = distil(first, Lesson(traffic[:4], hidden=hidden), replace(CONFIG, epochs=1, stopping_share=0.0))
    lesson = Lesson(traffic[:11], traffic[11:], begun.moments, hidden=hidden)
    return Stored(store, versions, drafter, version, lesson)


@pytest.mark.parametrize(
    ("kind", "sharded"),
    [("causal_lm", False), ("causal_lm", True), ("eagle", True), ("medusa", False)],
    ids=["DDP", "FSDP2", "FSDP2 on hidden states", "DDP on hidden states"],
)
def test_two_processes_come_to_the_weights_of_one(
    target: Target, answered: list[FeedbackRecord], tmp_path: Path, kind: str, sharded: bool
) -> None:
    stored = store_of(target, answered, tmp_path, kind)
    alone = distil(stored.parent, stored.lesson, CONFIG)
    together = stored.distil(sharded=sharded)
    start = stored.parent.own_tensors()
    for name, tensor in alone.student.own_tensors().items():
        torch.testing.assert_close(together.student.own_tensors()[name], tensor, rtol=0, atol=TOLERANCE)
        if tensor.is_floating_point():
            moved = (tensor - start[name]).abs().max()
            assert moved > 300 * TOLERANCE, f"{name} was hardly trained"
    assert together.report.steps == alone.report.steps > 10
    assert together.report.last_loss == pytest.approx(alone.report.last_loss, rel=1e-5)
    assert together.report.set_aside_losses == pytest.approx(alone.report.set_aside_losses, rel=1e-5)
    assert together.moments.step == alone.moments.step
    for name, tensor in alone.moments.tensors.items():
        torch.testing.assert_close(together.moments.tensors[name], tensor, rtol=0.01, atol=1e-6)


def test_a_run_that_fails_says_why_as_it_would_alone(stored: Stored) -> None:
    broken = replace(CONFIG, learning_rate=float("1e38"))
    with pytest.raises(TrainingFailed) as alone:
        distil(stored.parent, stored.lesson, broken)
    with pytest.raises(TrainingFailed) as together:
        stored.distil(broken)
    assert "not finite" in str(together.value)
    assert str(together.value) == str(alone.value)


def test_a_process_that_ends_early_is_a_failure_with_its_last_lines(stored: Stored) -> None:
    path = stored.store.path(stored.version.weights_sha256)
    parent = stored.parent
    path.write_bytes(b"broken")
    by = Launch(stored.versions.files, stored.store.folder, DistributedConfig(trainer_processes=2))
    with pytest.raises(TrainingFailed, match="does not match its sha256") as failure:
        by.distil(stored.drafter, stored.version, parent, stored.lesson, CONFIG, lambda: None)
    report = failure.value.report
    assert (report.outcome, report.records) == ("failed", len(stored.lesson.window) + len(stored.lesson.replay))
    assert report.reason.startswith("a training process ended early, torchrun with code 1")


class Lost(RuntimeError):
    """The lease."""


def processes(folder: Path) -> list[int]:
    """Those that run with a path in `folder` on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return sorted(found)


def test_with_the_lease_the_processes_are_gone(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []

    def should_stop() -> None:
        seen[:] = processes(tmp_path)
        if len(seen) >= 3:  # torchrun and its two
            raise Lost

    with pytest.raises(Lost):
        stored.distil(replace(CONFIG, epochs=100_000), should_stop=should_stop)
    assert len(seen) >= 3
    until(lambda: processes(tmp_path) == [])
    assert not list(tmp_path.glob("redraft-training-*"))


def kill_a_process(folder: Path, runs: set[int], times: int) -> None:
    """One of torchrun's own in each of the first `times` runs, as the kernel or a fault of Gloo would."""
    torchrun, *own = processes(folder) or [0]
    if own and len(runs | {torchrun}) <= times and torchrun not in runs:
        os.kill(own[-1], signal.SIGABRT)
        runs.add(torchrun)


def test_a_process_that_is_killed_is_made_up_for_by_a_second_run(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs: set[int] = set()
    alone = distil(stored.parent, stored.lesson, CONFIG).student.own_tensors()
    made = stored.distil(should_stop=lambda: kill_a_process(tmp_path, runs, 1))
    assert len(runs) == 1
    for name, tensor in made.student.own_tensors().items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=TOLERANCE)


def test_processes_that_are_killed_again_and_again_are_a_failure_with_the_signal(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs: set[int] = set()
    with pytest.raises(TrainingFailed, match="Signal 6"):
        stored.distil(should_stop=lambda: kill_a_process(tmp_path, runs, TRIES))
    assert len(runs) == TRIES


def test_without_its_owner_a_process_ends_itself() -> None:
    owner = subprocess.Popen(["true"])
    _check(os.getpid())
    owner.wait()
    with pytest.raises(OwnerGone, match=str(owner.pid)):
        _check(owner.pid)


def test_one_process_needs_no_launch(stored: Stored) -> None:
    assert launch(stored.versions, stored.store, DistributedConfig()) is None
    with pytest.raises(SettingError, match="TRAINER_PROCESSES"):
        read(DistributedConfig, {"REDRAFT_TRAINER_PROCESSES": "0"})
