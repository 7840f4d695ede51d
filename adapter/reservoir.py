"""Which earlier records are kept to be trained on again, and which of them a run takes: so that less is forgotten.

A reservoir holds a uniform sample of each workload's training records, so that a workload that comes rarely, or has
not come for days, is not washed out by the others. A record's rank is a hash of its id: a sample of samples is one,
and the same records give the same reservoir whatever way they came in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, zip_longest

from storage.reservoirs import Kept

MOST = 4096  # references in all, however many workloads there are


@dataclass(frozen=True)
class Bounds:
    """What a reservoir holds at most."""

    per_workload: int
    oldest: float  # seconds since the epoch: windows kept before are left behind
    seed: int


def filled(kept: Iterable[Kept], bounds: Bounds) -> tuple[Kept, ...]:
    """The sample of `kept` within the bounds, by workload."""
    groups = _by_workload(k for k in kept if k.at >= bounds.oldest)
    each = min(bounds.per_workload, MOST // max(1, len(groups)))
    return tuple(chain.from_iterable(_ranked(group, str(bounds.seed))[:each] for group in groups))


def drawn(kept: Iterable[Kept], count: int, salt: str) -> list[Kept]:
    """`count` of them, the workloads in equal shares as far as they go; which ones depends on `salt` alone.

    Workloads come in a random order too: where there are more than `count`, none is always the one left out.
    """
    groups = sorted(_by_workload(kept), key=lambda group: _rank(salt, group[0].workload))
    in_turn = (k for turn in zip_longest(*(_ranked(group, salt) for group in groups)) for k in turn if k is not None)
    return [k for _, k in zip(range(count), in_turn, strict=False)]


def _by_workload(kept: Iterable[Kept]) -> list[list[Kept]]:
    """The records of each workload, the workloads in the order of their names."""
    groups: dict[str, list[Kept]] = {}
    for k in kept:
        groups.setdefault(k.workload, []).append(k)
    return [groups[workload] for workload in sorted(groups)]


def _ranked(group: list[Kept], salt: str) -> list[Kept]:
    return sorted(group, key=lambda k: _rank(salt, k.record_id))


def _rank(salt: str, name: str) -> bytes:
    return sha256(f"{salt}/{name}".encode()).digest()
