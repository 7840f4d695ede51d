"""What all arms of an experiment on learning share: the target, its answers to the workloads, and version 1."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.learnt import LearntDrafter
from adapter.target import Target
from adapter.versions import Versions
from benchmarks.answers import Segment, segment
from benchmarks.first import First, drafter_of, first_version
from benchmarks.workload import workload as prepared
from storage.weights import WeightsStore

Say = Callable[[str], None]


@dataclass(frozen=True)
class Traffic:
    """Which requests there are."""

    requests: int  # of each workload
    held_out: int  # further ones of each workload
    max_tokens: int
    seed: int | None  # of their order within a workload; None: the file's


@dataclass(frozen=True)
class Start:
    """Where version 1 comes from: `make` makes it, `key` says all that it depends on besides the target."""

    make: Callable[[], LearntDrafter]
    key: Any


@dataclass(frozen=True)
class Experiment:
    target: Target
    embedding: Tensor  # of the target, in fp32, as trainers have it
    first: First
    segments: tuple[Segment, ...]
    folder: Path  # for what the arms store, dropped afterwards

    def drafter(self) -> CausalLM:
        """Version 1 in memory."""
        return drafter_of(self.first, self.embedding)


def prepare(
    target: Target,
    embedding: Tensor,
    texts: Mapping[str, Sequence[str]],
    traffic: Traffic,
    start: Start,
    cache: Path,
    folder: Path,
    say: Say = lambda line: None,
) -> Experiment:
    """The target is asked only for what is not kept in `cache`."""
    count = traffic.requests + traffic.held_out
    room = target.context - traffic.max_tokens
    workloads = [prepared(name, found, target, count, room) for name, found in texts.items()]
    versions = Versions(WeightsStore(folder / "weights"), target.files, embedding)
    first = first_version(start.make, [target.files.fingerprint, str(target.dtype), start.key], versions, cache)
    segments = []
    for found in workloads:
        say(f"{found.name}: {traffic.requests} requests of traffic, {traffic.held_out} held out")
        segments.append(segment(target, found, traffic.held_out, traffic.max_tokens, traffic.seed, cache, say))
    return Experiment(target, embedding, first, tuple(segments), folder)


class Clock:
    """Says how far the work is, and how long the rest will take at the pace so far."""

    EVERY = 15.0  # seconds

    def __init__(self, steps: int, say: Say) -> None:
        self._steps, self._say, self._done = steps, say, 0
        self._began = self._said = perf_counter()

    def step(self, count: int, line: str) -> None:
        self._done += count
        now = perf_counter()
        if self._done and now - self._said >= self.EVERY:
            self._said = now
            left = (now - self._began) * (self._steps / self._done - 1)
            self._say(f"  {line}; about {max(left, 0.0) / 60:.1f} min left")
