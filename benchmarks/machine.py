"""The machine under a measurement, and how much memory this process holds; figures mean little without them."""

import gc
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from adapter.target import Target

CPU = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # writing 5 sets the peak back to what is resident now (Linux)


@dataclass(frozen=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    cores: int
    threads: int
    torch: str
    transformers: str
    target: str
    dtype: str
    device: str


def machine(target: Target) -> Machine:
    return Machine(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        target=target.files.name,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
    )


def cpu_model() -> str:
    with suppress(OSError):
        for line in CPU.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@contextmanager
def still_heap() -> Iterator[None]:
    """As in service: what is loaded is not walked again by the garbage collector, whose pauses would hit one arm."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """A list that holds this process's peak of resident memory in the block, in MB, when the block is over.

    Where the system cannot set the peak back it is that of the process's whole life.
    """
    found: list[float] = []
    with suppress(OSError):
        CLEAR_REFS.write_text("5")
    yield found
    found.append(_peak_mb())


def _peak_mb() -> float:
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
