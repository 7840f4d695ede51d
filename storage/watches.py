"""Watches: the time after a promotion in which a share of the requests stays on the predecessor.

A canary's time is a watch, too: its predecessor is the version that is live, which keeps the larger share. Opened by
the promotion itself, or as the canary goes out, and closed by the next move of the pointer, both in that move's
transaction, or by the worker's verdict. Requests are written down as they are folded into the history, each once, so
the test can be repeated from SQL alone, whatever happens to Redis.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, delete, insert, select
from sqlalchemy.orm import Session

from storage import lookup
from storage.database import now, reading, transaction
from storage.observed import Observation, observed
from storage.records import FeedbackRecord
from storage.tables import DrafterRow, ObservationRow, VersionRow, WatchRow

FIELDS = ("workload", "policy", "held", "strayed", "proposed", "accepted", "tokens", "ms")


@dataclass(frozen=True)
class Watch:
    id: int
    drafter: str  # name
    version: int  # number
    predecessor: int  # number
    generation: int  # of the promotion, or of the canary's sending out
    share: float  # of the requests, that stays on the predecessor while the watch is open
    canary: bool  # the version is a canary, and the predecessor is live
    state: str  # open, safe, worse, ended, overtaken
    reason: str
    requests: int  # that the findings are about
    findings: list[dict[str, Any]]
    opened_at: datetime
    closed_at: datetime | None


class Watches:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def open(self, drafter: str) -> Watch | None:
        """The drafter's watch that goes on now."""
        with reading(self.engine) as session:
            row = open_row(session, lookup.drafter_row(session, drafter).id)
            return _watch(session, row) if row else None

    def recent(self, drafter: str, limit: int) -> list[Watch]:
        """The newest watches first, open or closed."""
        with reading(self.engine) as session:
            owner = lookup.drafter_row(session, drafter).id
            found = select(WatchRow).where(WatchRow.drafter_id == owner).order_by(WatchRow.id.desc()).limit(limit)
            return [_watch(session, row) for row in session.scalars(found)]

    def observations(self, watch: Watch) -> list[Observation]:
        """All requests seen so far, in the order in which they came; none of a watch that is closed."""
        columns = [getattr(ObservationRow, name) for name in FIELDS]
        with reading(self.engine) as session:
            found = select(*columns).where(ObservationRow.watch_id == watch.id).order_by(ObservationRow.id)
            return [Observation(*row) for row in session.execute(found).tuples()]

    def hours(self, watch: Watch) -> float:
        """Since the promotion, by the database's clock."""
        with reading(self.engine) as session:
            return (now(session) - watch.opened_at).total_seconds() / 3600

    def note(self, watch: Watch, requests: int, findings: Sequence[dict[str, Any]], reason: str) -> None:
        """Keep what the test says so far; a watch that was closed meanwhile stays as it is."""
        with transaction(self.engine) as session:
            if (row := _locked(session, watch)) is not None:
                row.requests, row.findings, row.reason = requests, list(findings), reason

    def close(self, watch: Watch, state: str, reason: str) -> None:
        """The watch ends without a move: "safe" or "ended"."""
        with transaction(self.engine) as session:
            if (row := _locked(session, watch)) is not None:
                _close(session, row, state, reason)


def start(
    session: Session,
    version: VersionRow,
    predecessor: VersionRow,
    generation: int,
    share: float,
    canary: bool = False,
) -> None:
    """Open the watch of a promotion, or of a canary; `share` is the predecessor's."""
    session.add(
        WatchRow(
            drafter_id=version.drafter_id, version_id=version.id, predecessor_id=predecessor.id,
            generation=generation, share=share, canary=canary, state="open", reason="", requests=0, findings=[],
            opened_at=now(session),
        )
    )  # fmt: skip


def stop(session: Session, drafter_id: int, state: str, reason: str) -> None:
    """The pointer moves on: close the watch that goes on, if there is one."""
    if (row := open_row(session, drafter_id)) is not None:
        _close(session, row, state, reason)
        session.flush()  # before the next one opens: only one may be open


def observe(session: Session, records: Iterable[FeedbackRecord]) -> None:
    """Write down what open watches see of records, which must be new ones."""
    found = select(WatchRow, DrafterRow.name).join(DrafterRow, DrafterRow.id == WatchRow.drafter_id)
    unclosed = found.where(WatchRow.state == "open").with_for_update(of=WatchRow)  # nor closed before we have written
    watches = {name: row for row, name in session.execute(unclosed).tuples()}
    numbers = {row.id: lookup.numbers(session, row.drafter_id) for row in watches.values()}
    rows: list[dict[str, Any]] = []
    for record in records:
        row = watches.get(record.drafter)
        if row is None or record.finished_at < row.opened_at.timestamp():
            continue
        known = numbers[row.id]
        seen = observed(record, row.share, known[row.version_id], known[row.predecessor_id])
        if seen is not None:
            rows.append({"watch_id": row.id, **{name: getattr(seen, name) for name in FIELDS}})
    if rows:
        session.execute(insert(ObservationRow), rows)  # ids in the order of the records


def open_row(session: Session, drafter_id: int) -> WatchRow | None:
    return session.scalar(select(WatchRow).where(WatchRow.drafter_id == drafter_id, WatchRow.state == "open"))


def _locked(session: Session, watch: Watch) -> WatchRow | None:
    """The row, if it is still open."""
    return session.scalar(select(WatchRow).where(WatchRow.id == watch.id, WatchRow.state == "open").with_for_update())


def _close(session: Session, row: WatchRow, state: str, reason: str) -> None:
    row.state, row.reason, row.closed_at = state, reason, now(session)
    session.execute(delete(ObservationRow).where(ObservationRow.watch_id == row.id))


def _watch(session: Session, row: WatchRow) -> Watch:
    numbers = lookup.numbers(session, row.drafter_id)
    return Watch(
        id=row.id,
        drafter=session.get_one(DrafterRow, row.drafter_id).name,
        version=numbers[row.version_id],
        predecessor=numbers[row.predecessor_id],
        generation=row.generation,
        share=row.share,
        canary=bool(row.canary),
        state=row.state,
        reason=row.reason,
        requests=row.requests,
        findings=row.findings,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
    )
