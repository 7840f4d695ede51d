"""One of the processes that make a run of training together, as torchrun starts it: reads the order, takes part.

All find the same; the first one writes it down. A run that fails as runs may (a loss that is no number) is a result
too; anything else ends the process with an error, which ends the others.
"""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from adapter import moments
from adapter.crew import whole
from adapter.distil import Distilled, Lesson, TrainingFailed, distil
from adapter.distributed import (
    FAULT,
    HIDDEN,
    LEFT,
    MOMENTS,
    ORDER,
    RECORDS,
    REPORT,
    STUDENT,
    Order,
    orders,
    records,
    reports,
)
from adapter.distributed_crew import Copies, Shards
from adapter.drafters.learnt import LearntDrafter
from adapter.target import load_embedding
from adapter.versions import Versions
from storage.decisions import TrainingReport
from storage.weights import WeightsStore


class OwnerGone(RuntimeError):
    """The process that asked for the run has ended: nobody waits for the result."""


def main(folder: Path) -> None:
    """Take part in the run that `folder` holds; the first of the processes to fail leaves its error there."""
    try:
        _main(folder)
    except Exception:
        with suppress(FileExistsError), (folder / FAULT).open("x") as fault:
            fault.write(traceback.format_exc())
        raise


def _main(folder: Path) -> None:
    order = orders.validate_json((folder / ORDER).read_bytes())
    torch.set_num_threads(order.threads)
    device = _device(order.device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    _take_part(folder, order, device)
    distributed.barrier()  # the first one may still write the result, and the end of any process ends it
    distributed.destroy_process_group()


def _device(kind: str) -> torch.device:
    """Each process has a GPU of its own."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _take_part(folder: Path, order: Order, device: torch.device) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    crew = (Shards if order.sharded else Copies)(rank, size)
    versions = Versions(WeightsStore(order.weights), order.files, load_embedding(order.files).to(device))
    parent = versions.load(order.parent, order.drafter)
    try:
        made = distil(parent, _lesson(folder, parent), order.config, lambda: _check(order.owner), crew)
    except TrainingFailed as failure:
        _write(folder, rank, failure.report, None)
        return
    _write(folder, rank, made.report, made)


def _lesson(folder: Path, parent: LearntDrafter) -> Lesson:
    window, replay = records.decode((folder / RECORDS).read_bytes())
    carried, hidden = folder / MOMENTS, folder / HIDDEN
    return Lesson(
        window,
        replay,
        moments=moments.from_bytes(carried.read_bytes(), parent) if carried.exists() else None,
        hidden=load_file(hidden) if hidden.exists() else {},
    )


def _write(folder: Path, rank: int, report: TrainingReport, made: Distilled | None) -> None:
    """The result; everybody puts the shards together, the first one keeps them."""
    tensors = {n: whole(t).detach().cpu().contiguous() for n, t in made.student.own_tensors().items()} if made else {}
    if rank:
        return
    if made is not None:
        save_file(tensors, folder / STUDENT)
        (folder / LEFT).write_bytes(moments.to_bytes(made.moments))
    unnamed = folder / f"{REPORT}.part"
    unnamed.write_bytes(reports.dump_json(report))
    unnamed.rename(folder / REPORT)  # last, and whole: with it there is a result


def _check(owner: int) -> None:
    """The owner ends its processes itself, unless it was killed."""
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        raise OwnerGone(f"process {owner}, which asked for this run, is gone") from None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
