"""What the commands say about a version's acceptance: figures of live traffic, always with their k."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cli.output import figure
from storage.history import AcceptanceRow, merged


@dataclass(frozen=True)
class Acceptance:
    """Live traffic of one version, or of a part of it. Rate and length are None where nothing was proposed."""

    requests: int
    rounds: int
    k: int | None  # the longest proposal
    acceptance_rate: float | None  # accepted / proposed
    acceptance_length: float | None  # 1 + accepted / rounds
    draft_ms: float | None  # a round
    verify_ms: float | None  # a round


NOTHING = Acceptance(0, 0, None, None, None, None, None)


def total(rows: Sequence[AcceptanceRow]) -> Acceptance:
    """The figures of rows taken together."""
    if not rows:
        return NOTHING
    row = merged(rows)
    return Acceptance(
        requests=row.requests,
        rounds=row.rounds,
        k=row.k,
        acceptance_rate=row.acceptance_rate,
        acceptance_length=row.acceptance_length,
        draft_ms=row.draft_ms / row.rounds,
        verify_ms=row.verify_ms / row.rounds,
    )


def of_version(rows: Iterable[AcceptanceRow], number: int) -> Acceptance:
    """One version's figures over all workloads and policies, without what was verified lossily."""
    return total([row for row in rows if row.version == number and row.lossless])


def lossy_requests(rows: Iterable[AcceptanceRow], number: int) -> int:
    """One version's requests whose proposals were accepted leniently: no figure of theirs is among others."""
    return sum(row.requests for row in rows if row.version == number and not row.lossless)


def by_workload(rows: Iterable[AcceptanceRow], number: int) -> dict[tuple[str, str], Acceptance]:
    """One version's figures by (workload, policy)."""
    groups: dict[tuple[str, str], list[AcceptanceRow]] = {}
    for row in rows:
        if row.version == number:
            groups.setdefault((row.workload, row.policy), []).append(row)
    return {key: total(groups[key]) for key in sorted(groups)}


def as_json(groups: dict[tuple[str, str], Acceptance]) -> list[dict[str, Any]]:
    """`by_workload` as a list of objects."""
    return [{"workload": w, "policy": p, **vars(found)} for (w, p), found in groups.items()]


COLUMNS = ("requests", "k", "acceptance rate", "acceptance length")


def cells(found: Acceptance) -> tuple[str, str, str, str]:
    """The figures under `COLUMNS`."""
    k = "-" if found.k is None else str(found.k)
    return str(found.requests), k, figure(found.acceptance_rate), figure(found.acceptance_length, 2)
