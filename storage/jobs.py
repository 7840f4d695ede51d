"""Jobs as rows: a Celery message only rings; who may work is decided here, by a lease with a fencing number.

request -> take (a lease) -> renew ... -> finish. A holder that dies leaves an expired lease; `due` names the
job and the sweeper rings again. Every later write of a holder passes `hold`, which refuses a lease that was
overtaken. All times are the database's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Engine, and_, or_, select, update
from sqlalchemy.orm import Session

from storage.database import insert, now, reading, transaction
from storage.tables import JobRow

ATTEMPTS = 3


class LeaseLost(RuntimeError):
    """Another worker took the job over, or it was finished: stop; nothing of the last write was kept."""


@dataclass(frozen=True)
class Job:
    id: int
    kind: str
    drafter: str
    state: str  # queued, running, done, failed
    attempts: int
    holder: str
    lease_until: datetime | None
    reason: str
    created_at: datetime


@dataclass(frozen=True)
class Lease:
    """The right to work on a job, for as long as nobody holds a higher fence."""

    job_id: int
    fence: int
    drafter: str


def hold(session: Session, lease: Lease) -> None:
    """Lock the lease's job row for this transaction; raises `LeaseLost`, which rolls the transaction back."""
    held = update(JobRow).where(JobRow.id == lease.job_id, JobRow.fence == lease.fence, JobRow.state == "running")
    touched = session.execute(held.values(touched_at=now(session)).returning(JobRow.id))
    if touched.scalar_one_or_none() is None:
        raise LeaseLost(f"job {lease.job_id} is no longer held under fence {lease.fence}")


@contextmanager
def writing(engine: Engine, lease: Lease | None) -> Iterator[Session]:
    """A transaction that, with a lease, first checks that the job is still ours."""
    with transaction(engine) as session:
        if lease is not None:
            hold(session, lease)
        yield session


class Jobs:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def request(self, kind: str, drafter: str) -> Job | None:
        """Queue a job; None where one of this kind is open for this drafter already."""
        with transaction(self.engine) as session:
            moment = now(session)
            row = insert(session, JobRow).values(
                kind=kind, drafter=drafter, state="queued", fence=0, attempts=0, holder="", reason="",
                created_at=moment, touched_at=moment,
            )  # fmt: skip
            made = session.execute(row.on_conflict_do_nothing().returning(JobRow.id)).scalar_one_or_none()
            return None if made is None else _job(session.get_one(JobRow, made))

    def take(self, job_id: int, holder: str, lease_seconds: float) -> Lease | None:
        """Lease a job that is queued, or whose lease ran out; None where it is held, finished or given up."""
        with transaction(self.engine) as session:
            moment = now(session)
            row = session.scalar(select(JobRow).where(JobRow.id == job_id, _free(moment)).with_for_update())
            if row is None:
                return None
            if row.attempts >= ATTEMPTS:
                row.state, row.touched_at = "failed", moment
                row.reason = f"given up after {row.attempts} attempts; the last, by {row.holder}, never finished"
                return None
            row.state, row.holder, row.lease_until = (
                "running",
                holder,
                moment + timedelta(seconds=lease_seconds),
            )
            row.fence, row.attempts, row.touched_at = row.fence + 1, row.attempts + 1, moment
            return Lease(row.id, row.fence, row.drafter)

    def renew(self, lease: Lease, seconds: float) -> bool:
        """Extend the lease to `seconds` from now; False where it was lost."""
        try:
            with transaction(self.engine) as session:
                hold(session, lease)
                session.get_one(JobRow, lease.job_id).lease_until = now(session) + timedelta(seconds=seconds)
        except LeaseLost:
            return False
        return True

    def finish(self, lease: Lease, state: str, reason: str = "") -> None:
        """Close the job as "done" or "failed"; raises `LeaseLost` where it is not ours any more."""
        with transaction(self.engine) as session:
            hold(session, lease)
            row = session.get_one(JobRow, lease.job_id)
            row.state, row.reason, row.lease_until = state, reason, None

    def due(self) -> list[int]:
        """The jobs to ring for: queued, or running under a lease that ran out."""
        with reading(self.engine) as session:
            return list(session.scalars(select(JobRow.id).where(_free(now(session))).order_by(JobRow.id)))

    def recent(self, limit: int = 20) -> list[Job]:
        """The newest jobs first."""
        with reading(self.engine) as session:
            return [_job(row) for row in session.scalars(select(JobRow).order_by(JobRow.id.desc()).limit(limit))]


def _free(moment: datetime) -> ColumnElement[bool]:
    return or_(JobRow.state == "queued", and_(JobRow.state == "running", JobRow.lease_until < moment))


def _job(row: JobRow) -> Job:
    return Job(
        row.id, row.kind, row.drafter, row.state, row.attempts, row.holder, row.lease_until, row.reason,
        row.created_at,
    )  # fmt: skip
