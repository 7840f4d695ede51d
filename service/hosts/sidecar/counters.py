"""An engine's own speculative counters, read from its Prometheus page; differences between two readings.

A counter that is lower than before was reset with its process, and all that it shows has come since.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

PREFIXES: Final = ("vllm:", "llamacpp:", "redraft_")  # one shape; SGLang has gauges instead
DRAFTS: Final = "spec_decode_num_drafts"
PROPOSED: Final = "spec_decode_num_draft_tokens"
ACCEPTED: Final = "spec_decode_num_accepted_tokens"
BY_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos"
VERIFIED: Final = "sglang:spec_verify_calls"
SGLANG_GAUGES: Final = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
STARTED: Final = "process_start_time_seconds"
NO_PAGE: Final = (ValueError, IndexError)  # what prometheus_client raises

Series = tuple[str, tuple[tuple[str, str], ...]]  # name, and labels in their order


@dataclass(frozen=True)
class Reading:
    """One look at the page."""

    counters: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    started_at: float = 0.0  # of the engine's process; 0: it does not say


@dataclass(frozen=True)
class Growth:
    """What was counted between two readings."""

    drafts: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()

    @property
    def k(self) -> int:
        """The deepest position that was ever accepted, or else what was proposed on average."""
        return max(len(self.by_position), round(self.proposed / self.drafts) if self.drafts else 0)

    @property
    def histogram(self) -> tuple[int, ...]:
        """Rounds by accepted count, as far as positions tell: entry j counts those that accepted just j tokens."""
        reached = [self.drafts, *self.by_position, 0.0]
        return tuple(max(round(high - low), 0) for high, low in pairwise(reached))


def parse(page: str) -> Reading:
    """Raises one of `NO_PAGE` for what is no Prometheus page."""
    counters: dict[Series, float] = {}
    gauges: dict[str, float] = {}
    started = 0.0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if _counts(name):
                counters[name, tuple(sorted(sample.labels.items()))] = sample.value
            elif name in SGLANG_GAUGES:
                gauges[name] = sample.value
            elif name == STARTED:
                started = sample.value
    return Reading(counters, gauges, started)


def _counts(name: str) -> bool:
    bare = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), "")
    return bare in (DRAFTS, PROPOSED, ACCEPTED, BY_POSITION) or name == VERIFIED


def growth(before: Reading | None, after: Reading) -> Growth:
    """What came in between; nothing where there is no `before`, as nobody knows since when an engine has counted."""
    if before is None:
        return Growth()
    restarted = after.started_at > before.started_at > 0
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for (name, labels), value in after.counters.items():
        old = before.counters.get((name, labels), 0.0)
        grown = value if restarted or value < old else value - old
        bare = name.partition(":")[2] or name.removeprefix("redraft_")
        if bare == BY_POSITION:
            at = int(dict(labels).get("position", "0"))
            positions[at] = positions.get(at, 0.0) + grown
        else:
            sums[bare] = sums.get(bare, 0.0) + grown
    by_position = tuple(positions.get(at, 0.0) for at in range(max(positions, default=-1) + 1))
    return Growth(sums.get(DRAFTS, 0.0), sums.get(PROPOSED, 0.0), sums.get(ACCEPTED, 0.0), by_position)


def added(one: Growth, other: Growth) -> Growth:
    longest = max(len(one.by_position), len(other.by_position))
    pads = [growth.by_position + (0.0,) * (longest - len(growth.by_position)) for growth in (one, other)]
    return Growth(
        one.drafts + other.drafts,
        one.proposed + other.proposed,
        one.accepted + other.accepted,
        tuple(a + b for a, b in zip(*pads, strict=True)),
    )
