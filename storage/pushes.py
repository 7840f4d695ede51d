"""Pushes of weights into a running engine: every step a row, so that the next start knows where one was cut off.

pushing -> paused -> loaded -> verified -> active; from any of them, restoring -> restored, else off (the engine
decodes plainly) or unknown. `refused`: the engine was not touched.
"""

from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import ColumnElement, Engine, delete, select
from sqlalchemy.orm import Session

from storage.database import now, reading, transaction
from storage.tables import PushStepRow

SERVING = ("active", "restored")
SETTLED = (*SERVING, "refused", "off")
KEPT = 500  # steps of an endpoint


@dataclass(frozen=True)
class Weights:
    """A checkpoint file that an engine has served, or is to serve."""

    label: str  # what the engine calls it
    checkpoint: str  # file
    sha256: str
    version_id: int | None  # None: what the engine started with


@dataclass(frozen=True)
class PushStep:
    endpoint: str
    engine: str  # another after each start of the engine
    state: str
    label: str
    checkpoint: str
    sha256: str
    version_id: int | None
    target: str  # fingerprint of the target before the push
    detail: str
    at: datetime

    @property
    def settled(self) -> bool:
        return self.state in SETTLED

    @property
    def weights(self) -> Weights:
        return Weights(self.label, self.checkpoint, self.sha256, self.version_id)


class Pushes:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def note(
        self, endpoint: str, engine: str, state: str, weights: Weights, target: str = "", detail: str = ""
    ) -> None:
        """Add a step; of an endpoint the newest `KEPT` are kept."""
        with transaction(self.engine) as session:
            row = PushStepRow(
                endpoint=endpoint, engine=engine, state=state, label=weights.label, checkpoint=weights.checkpoint,
                sha256=weights.sha256, version_id=weights.version_id, target=target, detail=detail, at=now(session),
            )  # fmt: skip
            session.add(row)
            session.flush()
            newest = select(PushStepRow.id).where(PushStepRow.endpoint == endpoint).order_by(PushStepRow.id.desc())
            last = session.scalars(newest.offset(KEPT).limit(1)).one_or_none()
            if last is not None:
                session.execute(delete(PushStepRow).where(PushStepRow.endpoint == endpoint, PushStepRow.id <= last))

    def latest(self, endpoint: str) -> PushStep | None:
        """Where the endpoint stands: its newest step, but for those that did not touch the engine."""
        with reading(self.engine) as session:
            return _first(session, PushStepRow.endpoint == endpoint, PushStepRow.state != "refused")

    def served(self, endpoint: str, engine: str) -> PushStep | None:
        """The step with the weights that this run of the engine was last known to serve."""
        with reading(self.engine) as session:
            mine = (PushStepRow.endpoint == endpoint, PushStepRow.engine == engine)
            return _first(session, *mine, PushStepRow.state.in_(SERVING))

    def steps(self, endpoint: str, limit: int = 50) -> list[PushStep]:
        """The newest first."""
        with reading(self.engine) as session:
            found = select(PushStepRow).where(PushStepRow.endpoint == endpoint).order_by(PushStepRow.id.desc())
            return [_step(row) for row in session.scalars(found.limit(limit))]


def _first(session: Session, *where: ColumnElement[bool]) -> PushStep | None:
    row = session.scalars(select(PushStepRow).where(*where).order_by(PushStepRow.id.desc()).limit(1)).one_or_none()
    return _step(row) if row else None


def _step(row: PushStepRow) -> PushStep:
    return PushStep(**{field.name: getattr(row, field.name) for field in fields(PushStep)})
