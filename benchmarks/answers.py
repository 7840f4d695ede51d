"""The target's greedy answers to workloads, generated once and kept: what every arm and every later run replays.

Each answer has teacher rows at all of its positions, as each arm's drafter is refused elsewhere.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec

from adapter.sample import answers
from adapter.target import Target
from benchmarks.kept import kept
from benchmarks.workload import Workload
from storage.records import SCHEMA_VERSION, FeedbackRecord

BATCH = 16
TOP_K = 64
KIND = "answers"  # of the kept files

Say = Callable[[str], None]


@dataclass(frozen=True)
class Segment:
    """One workload's part of the experiment, as answered requests."""

    workload: str
    stream: tuple[FeedbackRecord, ...]  # the traffic, in its order
    held_out: tuple[FeedbackRecord, ...]  # never part of the traffic


def segment(
    target: Target, workload: Workload, held_out: int, max_tokens: int, seed: int | None, folder: Path, say: Say
) -> Segment:
    """The answered workload, of which `held_out` requests, at even steps, are kept out of the traffic.

    The traffic comes in an order drawn by `seed`, as files are grouped by topic; None: in the file's order.
    """
    records = _named(workload.name, answered(target, workload, max_tokens, folder, say))
    apart = {(2 * i + 1) * len(records) // (2 * held_out) for i in range(held_out)}
    stream = [record for i, record in enumerate(records) if i not in apart]
    if seed is not None:
        random.Random(f"{seed}/{workload.name}").shuffle(stream)
    return Segment(workload.name, tuple(stream), tuple(records[i] for i in sorted(apart)))


def answered(
    target: Target, workload: Workload, max_tokens: int, folder: Path, say: Say = lambda line: None
) -> tuple[FeedbackRecord, ...]:
    """In the order of the prompts; from the kept file where there is one."""
    key = [SCHEMA_VERSION, target.files.fingerprint, str(target.dtype), max_tokens, TOP_K, workload.prompts]
    return kept(folder, KIND, key, tuple[FeedbackRecord, ...], lambda: _generated(target, workload, max_tokens, say))


def _generated(target: Target, workload: Workload, max_tokens: int, say: Say) -> tuple[FeedbackRecord, ...]:
    """Prompts of like length together, so that little padding is computed."""
    prompts, began = workload.prompts, perf_counter()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, FeedbackRecord] = {}
    for i, record in zip(order, answers(target, [prompts[i] for i in order], max_tokens, BATCH, TOP_K), strict=True):
        found[i] = record
        if len(found) % BATCH == 0:
            left = (perf_counter() - began) * (len(prompts) / len(found) - 1)
            say(f"  {workload.name}: {len(found)} of {len(prompts)} answers, about {left / 60:.1f} min left")
    return tuple(found[i] for i in range(len(prompts)))


def _named(workload: str, records: Sequence[FeedbackRecord]) -> list[FeedbackRecord]:
    """Under the workload's name, with ids that no other workload's requests have."""
    return [
        msgspec.structs.replace(r, workload=workload, record_id=f"{i}-{r.record_id}", request_id=f"{i}-{r.request_id}")
        for i, r in enumerate(records)
    ]
