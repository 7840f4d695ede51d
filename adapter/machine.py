"""What the bits of a training run's result depend on besides its inputs: the kernels, and how many threads they use."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Two runs on equal ones give the same bits."""

    torch: str
    threads: int
    cpu: str  # model name
    capability: str  # of the CPU, as torch's kernels are chosen by
    mkldnn: bool
    accelerator: str  # name of the GPU; empty where there is none
    processes: int = 1  # that a run was shared by
    sharded: bool = False  # each held a share of the weights, not a copy


def machine(processes: int = 1, sharded: bool = False) -> Machine:
    """This process, as it would train now, alone or with others."""
    return Machine(
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        cpu=_cpu(),
        capability=torch.backends.cpu.get_cpu_capability(),
        mkldnn=bool(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        processes=processes,
        sharded=sharded,
    )


def _cpu() -> str:
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
