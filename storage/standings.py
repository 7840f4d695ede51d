"""Standings: how each drafter of a target does on each workload, and which windows that is known from.

The trainer replays every drafter on a window's requests (`worker/routing`) and revises the standings in one
transaction with the mark that says so: a window counts once, whoever replays it. Labels are chosen by clients, so
workloads are bounded in number: the least recently scored leaves first.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.orm import Session

from storage import routes
from storage.database import insert, now, reading, transaction
from storage.history import exact
from storage.tables import AcceptanceRow as Row
from storage.tables import DrafterRow, ScoredWindowRow, StandingRow, WindowRecordRow, WindowRow

WORKLOADS = 256  # a target
BACKLOG = 32  # newest windows of a target that are scored; older ones say little of today's drafters


@dataclass(frozen=True)
class Score:
    """Acceptance probability over the last requests."""

    requests: float  # that the figures are about; old ones fade
    mean: float
    variance: float  # between requests


@dataclass(frozen=True)
class Standing:
    """One drafter on one workload."""

    version: int  # number, as last scored
    weight: float  # of the workload's drafters; they sum to 1
    scores: Mapping[str, Score]  # by policy: greedy, sampled
    scored: int  # requests in all


ByDrafter = Mapping[str, Standing]  # by the drafter's name


class Standings:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def of(self, target_fingerprint: str) -> dict[str, dict[str, Standing]]:
        """By workload, and there by drafter."""
        with reading(self.engine) as session:
            return _standings(session, target_fingerprint)

    def unscored(self, target_fingerprint: str) -> list[int]:
        """Ids of the newest windows that are decided and not in the standings yet, oldest first."""
        found = (
            select(WindowRow.id, ScoredWindowRow.window_id)
            .join(DrafterRow, DrafterRow.id == WindowRow.drafter_id)
            .outerjoin(ScoredWindowRow, ScoredWindowRow.window_id == WindowRow.id)
            .where(DrafterRow.target_fingerprint == target_fingerprint)
            .where(WindowRow.state == "closed", WindowRow.deleted_at.is_(None))
            .order_by(WindowRow.id.desc())
            .limit(BACKLOG)
        )
        with reading(self.engine) as session:
            return sorted(window for window, scored in session.execute(found).tuples() if scored is None)

    def revise(
        self,
        target_fingerprint: str,
        window_id: int,
        change: Callable[[Mapping[str, ByDrafter]], Mapping[str, ByDrafter]],
    ) -> bool:
        """Replace the standings of the workloads that `change` returns; False where the window counts already."""
        with transaction(self.engine) as session:
            routes.lock(session, target_fingerprint)
            mark = insert(session, ScoredWindowRow).values(window_id=window_id, at=now(session))
            if session.scalar(mark.on_conflict_do_nothing().returning(ScoredWindowRow.window_id)) is None:
                return False
            for workload, by_drafter in change(_standings(session, target_fingerprint)).items():
                _keep(session, target_fingerprint, workload, by_drafter)
            _forget_workloads(session, target_fingerprint)
            return True

    def shares(self, target_fingerprint: str, hours: float) -> dict[str, float]:
        """By workload: its share of the requests in the target's windows of that time."""
        with reading(self.engine) as session:
            since = now(session) - timedelta(hours=hours)
            found = (
                select(WindowRecordRow.workload, func.count())
                .join(WindowRow, WindowRow.id == WindowRecordRow.window_id)
                .join(DrafterRow, DrafterRow.id == WindowRow.drafter_id)
                .where(DrafterRow.target_fingerprint == target_fingerprint, WindowRow.created_at >= since)
                .group_by(WindowRecordRow.workload)
            )
            counts = dict(session.execute(found).tuples().all())
        return {workload: count / sum(counts.values()) for workload, count in counts.items()}

    def draft_costs(self, drafters: list[str], hours: float) -> dict[str, float]:
        """By drafter: a draft step's time in target passes, where both were measured in that time."""
        with reading(self.engine) as session:
            since = now(session) - timedelta(hours=hours)
            found = (
                select(
                    Row.drafter,
                    func.sum(Row.draft_ms),
                    func.sum(Row.proposed),
                    func.sum(Row.verify_ms),
                    func.sum(Row.rounds),
                )
                .where(Row.drafter.in_(drafters), Row.bucket >= since, exact())
                .group_by(Row.drafter)
            )
            rows = session.execute(found).tuples().all()
        return {
            name: (draft_ms / proposed) / (verify_ms / rounds)
            for name, draft_ms, proposed, verify_ms, rounds in rows
            if proposed and rounds and verify_ms > 0
        }


def begin_anew(session: Session, target_fingerprint: str, workload: str) -> None:
    """Forget how the drafters did on a workload."""
    here = StandingRow.target_fingerprint == target_fingerprint
    session.execute(delete(StandingRow).where(here, StandingRow.workload == workload))


def _standings(session: Session, target_fingerprint: str) -> dict[str, dict[str, Standing]]:
    rows = (
        select(StandingRow, DrafterRow.name)
        .join(DrafterRow, DrafterRow.id == StandingRow.drafter_id)
        .where(StandingRow.target_fingerprint == target_fingerprint, DrafterRow.retired_at.is_(None))
    )
    found: dict[str, dict[str, Standing]] = {}
    for row, name in session.execute(rows).tuples():
        scores = {policy: Score(**score) for policy, score in row.scores.items()}
        found.setdefault(row.workload, {})[name] = Standing(row.version, row.weight, scores, row.scored)
    return found


def _keep(session: Session, target_fingerprint: str, workload: str, by_drafter: ByDrafter) -> None:
    begin_anew(session, target_fingerprint, workload)
    ids = select(DrafterRow.name, DrafterRow.id).where(DrafterRow.name.in_(by_drafter))
    known, moment = dict(session.execute(ids).tuples().all()), now(session)
    session.add_all(
        StandingRow(
            target_fingerprint=target_fingerprint, workload=workload, drafter_id=known[name],
            version=standing.version, weight=standing.weight, scored=standing.scored, at=moment,
            scores={policy: asdict(score) for policy, score in standing.scores.items()},
        )
        for name, standing in by_drafter.items()
    )  # fmt: skip
    session.flush()


def _forget_workloads(session: Session, target_fingerprint: str) -> None:
    """Those beyond the bound, least recently scored first."""
    last = func.max(StandingRow.at)
    found = select(StandingRow.workload).where(StandingRow.target_fingerprint == target_fingerprint)
    ordered = found.group_by(StandingRow.workload).order_by(last.desc(), StandingRow.workload).offset(WORKLOADS)
    for workload in session.scalars(ordered).all():
        begin_anew(session, target_fingerprint, workload)
