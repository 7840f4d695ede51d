"""Acceptance history: what each version accepted, by workload, policy, draft length and minute.

The worker folds every record of the stream in, each once, used for training or not; the operator's commands
and the demo read rows back. What was verified lossily has policies of its own, which say so. Acceptance rate and
acceptance length are different figures, with k beside both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from sqlalchemy import ColumnElement, Engine, delete, func, select
from sqlalchemy.orm import Session

from storage import watches
from storage.database import insert, now, reading, transaction
from storage.decisions import RoundCosts
from storage.records import LOSSY, FeedbackRecord, Round
from storage.tables import AcceptanceRow as Row
from storage.tables import FoldedRow

BATCH = 500  # rows a statement; SQLite bounds the number of its parameters
Key = tuple[str, int, str, str, int, datetime]  # drafter, version, workload, policy, k, bucket


@dataclass(frozen=True)
class AcceptanceRow:
    """Counts of one version; a request that several versions drafted for counts once for each of them."""

    version: int
    workload: str
    policy: str
    k: int  # the longest proposal of the request; in a merged row, of all of them
    bucket: datetime  # the minute, UTC; in a merged row, the newest one
    requests: int
    rounds: int
    proposed: int
    accepted: int
    histogram: tuple[int, ...]  # rounds by accepted count
    draft_ms: float
    verify_ms: float
    total_ms: float  # shared out between the versions of a request by the tokens that each committed
    output_tokens: int

    @property
    def lossless(self) -> bool:
        return not self.policy.endswith(LOSSY)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed; 0.0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds: the next token counts."""
        return 1 + self.accepted / self.rounds


def fold(engine: Engine, records: Iterable[FeedbackRecord]) -> int:
    """Add the records that were not folded yet, to open watches too; how many those were."""
    return len(fold_new(engine, records))


def fold_new(engine: Engine, records: Iterable[FeedbackRecord]) -> list[FeedbackRecord]:
    """`fold`, and the records that were new."""
    with transaction(engine) as session:
        fresh = _fresh(session, {record.record_id: record for record in records})
        totals: dict[Key, AcceptanceRow] = {}
        for record in fresh:
            for row in rows_of(record):
                key = (record.drafter, row.version, row.workload, row.policy, row.k, row.bucket)
                totals[key] = merged([totals[key], row]) if key in totals else row
        for key in sorted(totals):  # one order for all, so that two folders cannot block each other
            _add(session, key[0], totals[key])
        watches.observe(session, fresh)
        return fresh


def add(engine: Engine, drafter: str, row: AcceptanceRow) -> None:
    """Add figures that no record carries, such as an engine's own counters; these belong to no watch."""
    with transaction(engine) as session:
        _add(session, drafter, row)


def history(engine: Engine, drafter: str, since: datetime | None = None) -> list[AcceptanceRow]:
    """The drafter's rows from the minute of `since` on, oldest first."""
    found = select(Row).where(Row.drafter == drafter)
    if since is not None:
        found = found.where(Row.bucket >= since.replace(second=0, microsecond=0))
    ordered = found.order_by(Row.bucket, Row.version, Row.workload, Row.policy, Row.k)
    with reading(engine) as session:
        return [_view(row) for row in session.scalars(ordered)]


def by_version(engine: Engine, drafter: str) -> list[AcceptanceRow]:
    """The whole history, one row for each version, workload and policy."""
    groups: dict[tuple[int, str, str], list[AcceptanceRow]] = {}
    for row in history(engine, drafter):
        groups.setdefault((row.version, row.workload, row.policy), []).append(row)
    return [merged(groups[key]) for key in sorted(groups)]


def round_costs(engine: Engine, drafter: str, k: int) -> RoundCosts | None:
    """What exact rounds of requests with that longest proposal took; None where there were none, or no times."""
    sums = select(func.sum(Row.rounds), func.sum(Row.draft_ms), func.sum(Row.verify_ms))
    with reading(engine) as session:
        rounds, draft_ms, verify_ms = session.execute(sums.where(Row.drafter == drafter, Row.k == k, exact())).one()
    if not rounds or draft_ms + verify_ms <= 0:
        return None
    return RoundCosts(k, int(rounds), draft_ms / rounds, verify_ms / rounds)


def exact() -> ColumnElement[bool]:
    """Rows of what was verified exactly."""
    return Row.policy.not_like(f"%{LOSSY}")


def forget(engine: Engine, older_than: timedelta) -> None:
    """Drop the marks of records folded longer ago than that, when the stream cannot bring them again."""
    with transaction(engine) as session:
        session.execute(delete(FoldedRow).where(FoldedRow.folded_at < now(session) - older_than))


def merged(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The sum of rows, under the first one's version, workload and policy."""
    longest = max(len(row.histogram) for row in rows)
    padded = [row.histogram + (0,) * (longest - len(row.histogram)) for row in rows]
    return replace(
        rows[0],
        k=max(row.k for row in rows),
        bucket=max(row.bucket for row in rows),
        requests=sum(row.requests for row in rows),
        rounds=sum(row.rounds for row in rows),
        proposed=sum(row.proposed for row in rows),
        accepted=sum(row.accepted for row in rows),
        histogram=tuple(sum(column) for column in zip(*padded, strict=True)),
        draft_ms=sum(row.draft_ms for row in rows),
        verify_ms=sum(row.verify_ms for row in rows),
        total_ms=sum(row.total_ms for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
    )


def rows_of(record: FeedbackRecord) -> list[AcceptanceRow]:
    """What one record adds, by version. A request without rounds proposed nothing and adds no row."""
    if not record.rounds:
        return []
    versions = sorted({r.version for r in record.rounds})
    by_number = [(version, [r for r in record.rounds if r.version == version]) for version in versions]
    committed = [sum(r.accepted + 1 for r in rounds) for _, rounds in by_number]
    return [
        _counted(record, version, rounds, share / sum(committed), tokens)
        for (version, rounds), share, tokens in zip(
            by_number, committed, _shared_out(len(record.output), committed), strict=True
        )
    ]


def _counted(
    record: FeedbackRecord, version: int, rounds: list[Round], share: float, output_tokens: int
) -> AcceptanceRow:
    k = max(r.proposed for r in rounds)
    finished = datetime.fromtimestamp(record.finished_at, UTC)
    return AcceptanceRow(
        version=version,
        workload=record.workload,
        policy=record.policy,
        k=k,
        bucket=finished.replace(second=0, microsecond=0),
        requests=1,
        rounds=len(rounds),
        proposed=sum(r.proposed for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        histogram=tuple(sum(r.accepted == count for r in rounds) for count in range(k + 1)),
        draft_ms=sum(r.draft_ms for r in rounds),
        verify_ms=sum(r.verify_ms for r in rounds),
        total_ms=record.total_ms * share,
        output_tokens=output_tokens,
    )


def _shared_out(total: int, weights: list[int]) -> list[int]:
    """Whole numbers in proportion to the weights that add up to the total."""
    bounds = [round(total * sum(weights[:n]) / sum(weights)) for n in range(len(weights) + 1)]
    return [high - low for low, high in pairwise(bounds)]


def _fresh(session: Session, records: dict[str, FeedbackRecord]) -> list[FeedbackRecord]:
    """Mark the records as folded; those that were not yet."""
    moment, ids, added = now(session), sorted(records), set[str]()
    for start in range(0, len(ids), BATCH):
        rows = [{"record_id": i, "folded_at": moment} for i in ids[start : start + BATCH]]
        marked = insert(session, FoldedRow).values(rows).on_conflict_do_nothing()
        added.update(session.scalars(marked.returning(FoldedRow.record_id)))
    return [record for identity, record in records.items() if identity in added]


def _add(session: Session, drafter: str, counts: AcceptanceRow) -> None:
    identity = {
        "drafter": drafter, "version": counts.version, "workload": counts.workload,
        "policy": counts.policy, "k": counts.k, "bucket": counts.bucket,
    }  # fmt: skip
    zeros = dict.fromkeys(_SUMS, 0)
    empty = insert(session, Row).values(**identity, **zeros, histogram=[0] * len(counts.histogram))
    session.execute(empty.on_conflict_do_nothing())
    row = session.scalars(select(Row).filter_by(**identity).with_for_update()).one()
    total = merged([_view(row), counts])
    for name in _SUMS:
        setattr(row, name, getattr(total, name))
    row.histogram = list(total.histogram)
    session.flush()


_SUMS = (
    "requests", "rounds", "proposed", "accepted", "draft_ms", "verify_ms", "total_ms", "output_tokens",
)  # fmt: skip


def _view(row: Row) -> AcceptanceRow:
    sums = {name: getattr(row, name) for name in _SUMS}
    return AcceptanceRow(
        row.version, row.workload, row.policy, row.k, row.bucket, histogram=tuple(row.histogram), **sums
    )
