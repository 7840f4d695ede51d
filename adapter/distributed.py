"""Distillation by several processes: the run's owner writes it into a folder, torchrun starts them, the result is read.

`Launch.distil` is called like `adapter/distil.distil` and gives the same: the same weights within the tolerance of
sums of floats in another order. Each process is `adapter/distributed_child`. Files are safetensors, MessagePack and
JSON; they are this process's own, in a temporary folder.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import psutil
import structlog
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

import adapter
from adapter import moments
from adapter.distil import DistilConfig, Distilled, Lesson, TrainingFailed
from adapter.drafters.learnt import LearntDrafter
from adapter.fingerprints import TargetFiles
from adapter.versions import Versions
from storage.config import setting
from storage.decisions import TrainingReport
from storage.records import FeedbackRecord
from storage.views import Drafter, Version
from storage.weights import WeightsStore

log = structlog.get_logger()

POLL_SECONDS = 0.2
TRIES = 2  # of a run whose processes end without an error of their own: killed, or by a fault of Gloo or NCCL
GRACE_SECONDS = 10.0  # between asking the processes to end and ending them
LINES = 15  # of what each process wrote, in the reason of a failure
ORDER, RECORDS, HIDDEN, MOMENTS = "order.json", "records.msgpack", "hidden.safetensors", "moments.safetensors"
REPORT, STUDENT, LEFT = "report.json", "student.safetensors", "left.safetensors"
OUTPUT, ERRORS, FAULT = "output.txt", "errors", "fault.txt"


@dataclass(frozen=True)
class DistributedConfig:
    """How many processes make one run of training."""

    trainer_processes: int = setting(
        1, "processes of one training run, started by torchrun where there are several (DDP; NCCL on CUDA, else Gloo)"
    )
    trainer_sharded: bool = setting(
        False, "several processes hold a share of the drafter and its optimiser each (FSDP2), not a copy"
    )

    def __post_init__(self) -> None:
        if self.trainer_processes < 1:
            raise ValueError(f"REDRAFT_TRAINER_PROCESSES={self.trainer_processes}: use 1 or more")


@dataclass(frozen=True)
class Order:
    """What each process is told, beside the records."""

    config: DistilConfig
    drafter: Drafter
    parent: Version
    files: TargetFiles
    weights: Path  # folder of the weights store
    device: str
    threads: int
    sharded: bool
    owner: int  # process id: without it the work is for nobody


orders, reports = TypeAdapter(Order), TypeAdapter(TrainingReport)
records = msgspec.msgpack.Decoder(tuple[list[FeedbackRecord], list[FeedbackRecord]])  # of the window, replayed


@dataclass(frozen=True)
class Launch:
    """Starts the processes of the runs of one target's drafters."""

    files: TargetFiles
    weights: Path  # folder of the weights store
    config: DistributedConfig

    def distil(
        self,
        drafter: Drafter,
        version: Version,
        parent: LearntDrafter,
        lesson: Lesson,
        config: DistilConfig,
        should_stop: Callable[[], None],
    ) -> Distilled:
        """As `distil` of `parent`, which is `version` of `drafter`. `should_stop` is called all the while.

        Raises `TrainingFailed` as that does, and where a process ended otherwise than by finishing.
        """
        order = Order(
            config=config,
            drafter=drafter,
            parent=version,
            files=self.files,
            weights=self.weights.absolute(),
            device=parent.target_to_draft.device.type,
            threads=torch.get_num_threads(),
            sharded=self.config.trainer_sharded,
            owner=os.getpid(),
        )
        with tempfile.TemporaryDirectory(prefix="redraft-training-") as name:
            folder = Path(name)
            _write(folder, order, lesson)
            began = time.monotonic()
            code = self._run(folder, should_stop)
            if not (folder / REPORT).exists():
                raise TrainingFailed(_failure(folder, order, lesson, code, time.monotonic() - began))
            return _result(folder, parent, lesson)

    def _run(self, folder: Path, should_stop: Callable[[], None]) -> int:
        """torchrun's exit code. A result counts whatever becomes of the processes after they have agreed on it."""
        for attempt in range(1, TRIES + 1):
            code = _run(folder, self.config.trainer_processes, should_stop)
            log.info("processes.ended", processes=self.config.trainer_processes, code=code, attempt=attempt)
            if (folder / REPORT).exists() or (folder / FAULT).exists():
                break
        return code


def launch(weights: Versions, store: WeightsStore, config: DistributedConfig) -> Launch | None:
    """As the settings say; None where one process trains, which is this one."""
    return Launch(weights.files, store.folder, config) if config.trainer_processes > 1 else None


def _write(folder: Path, order: Order, lesson: Lesson) -> None:
    (folder / ORDER).write_bytes(orders.dump_json(order))
    (folder / RECORDS).write_bytes(msgspec.msgpack.encode((lesson.window, lesson.replay)))
    if lesson.hidden:
        save_file({name: states.contiguous() for name, states in lesson.hidden.items()}, folder / HIDDEN)
    if lesson.moments is not None:
        (folder / MOMENTS).write_bytes(moments.to_bytes(lesson.moments))


def _run(folder: Path, processes: int, should_stop: Callable[[], None]) -> int:
    """torchrun's exit code. Where `should_stop` raises, nothing of it is left running."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--max-restarts", "0", "--redirects", "2", "--log-dir", str(folder / ERRORS),
        "-m", "adapter.distributed_child", str(folder),
    ]  # fmt: skip
    with (folder / OUTPUT).open("wb") as output:
        launcher = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        try:
            while launcher.poll() is None:
                should_stop()
                time.sleep(POLL_SECONDS)
        finally:
            _end(launcher)
    return launcher.returncode


def _environment() -> dict[str, str]:
    """This process's, so that the others run the same code with as many threads."""
    root = str(Path(adapter.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def _end(launcher: "subprocess.Popen[bytes]") -> None:
    """End torchrun, where it still runs, and its processes, each of which has a session of its own."""
    try:
        head = psutil.Process(launcher.pid)
        family = [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    _each(family, psutil.Process.terminate)
    _, left = psutil.wait_procs(family, GRACE_SECONDS)
    _each(left, psutil.Process.kill)
    launcher.wait()


def _each(family: Iterable[psutil.Process], end: Callable[[psutil.Process], None]) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):
            end(process)


def _result(folder: Path, parent: LearntDrafter, lesson: Lesson) -> Distilled:
    """What the first of the processes left."""
    report = replace(reports.validate_json((folder / REPORT).read_bytes()), inputs=lesson.inputs)
    if report.outcome == "failed":
        raise TrainingFailed(report)
    student = parent.twin()
    student.load_own(load_file(folder / STUDENT))
    return Distilled(student, report, moments.from_bytes((folder / LEFT).read_bytes(), student))


def _failure(folder: Path, order: Order, lesson: Lesson, code: int, seconds: float) -> TrainingReport:
    """Of a run that came to no report: the error of the first process that had one, else what all of them wrote."""
    fault = folder / FAULT
    said = [fault] if fault.exists() else [folder / OUTPUT, *sorted((folder / ERRORS).rglob("stderr.log"))]
    lines = [line for file in said for line in file.read_text(errors="replace").strip().splitlines()[-LINES:]]
    return TrainingReport(
        seed=order.config.seed,
        config=asdict(order.config),
        records=len(lesson.window) + len(lesson.replay),
        positions=0,
        steps=0,
        first_loss=0.0,
        last_loss=0.0,
        seconds=seconds,
        outcome="failed",
        reason="\n".join([f"a training process ended early, torchrun with code {code}:", *lines]),
        inputs=lesson.inputs,
    )
