"""A process that decodes keeps its memory, and does not pile it up."""

import os
import subprocess
import sys

import pytest

from cli.children import CHECKOUT
from service.engine.heap import CACHES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's figures of a process")

ROUNDS, PAGES = 40, 384
FAULTS = """
import os, resource
from service.engine.heap import settle
settle(os.environ)
import torch
logits = torch.zeros(8, 49152, dtype=torch.bfloat16)
def round():
    return logits.float().logsumexp(-1)
for _ in range(40):  # until the blocks have found their places
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
GROWTH = """
import os
from service.engine.heap import settle
if {settled}:
    settle(os.environ)
import torch
from torch import nn
from adapter.packing import PackedLinear
torch.set_num_threads(1)
linear = PackedLinear(nn.Linear(64, 64))
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
with torch.inference_mode():
    for width in range(1, 301):
        linear(torch.zeros(width, 64))
    before = resident()
    for width in range(301, 901):
        linear(torch.zeros(width, 64))
print(resident() - before)
"""


def said(script: str) -> float:
    """What a script prints, run in a process of its own, which nobody has settled before."""
    environ = {name: value for name, value in os.environ.items() if name not in CACHES}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT, env=environ)
    return float(ran.stdout)


def test_blocks_of_a_round_are_used_again_without_fresh_pages() -> None:
    """Each of the rounds makes and drops a block of that many pages; without the habit, often all are fresh."""
    assert said(FAULTS) < 0.1 * ROUNDS * PAGES


def test_kernels_for_many_widths_do_not_pile_up() -> None:
    """Megabytes that six hundred further widths cost."""
    assert said(GROWTH.format(settled=True)) < 0.5 * said(GROWTH.format(settled=False))
