"""The replay reservoir's rows and file: references to records of earlier windows, which stay where they are.

A training run names the file of the reservoir that it drew from (in the weights store, beside the windows); the next
run adds the windows since. There is no copy of a record in it, so a window that is deleted, or written again without
a tenant, takes its records out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, Engine, select
from sqlalchemy.orm import Session

from storage import lookup
from storage.database import reading
from storage.tables import DrafterRow, TrainingRow, WindowRecordRow, WindowRow


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """One record in a reservoir."""

    record_id: str
    window_id: int
    workload: str
    at: float  # when its window was kept, in seconds since the epoch


@dataclass(frozen=True)
class Filled:
    """A reservoir as a run had it."""

    window_id: int  # of the run; the reservoir holds records of earlier windows
    sha256: str


LOOK_BACK = 100  # runs; those that failed before their reservoir was filled name none
BATCH = 500  # ids a query; SQLite bounds the number of its parameters
_decoder = msgspec.msgpack.Decoder(tuple[Kept, ...])


def to_bytes(kept: Iterable[Kept]) -> bytes:
    return msgspec.msgpack.encode(tuple(kept))


def from_bytes(data: bytes) -> tuple[Kept, ...]:
    return _decoder.decode(data)


def newest(engine: Engine, drafter: str, before: int) -> Filled | None:
    """The reservoir of the drafter's newest run on a window before the window `before`."""
    with reading(engine) as session:
        return _newest(session, WindowRow.drafter_id == lookup.drafter_row(session, drafter).id, WindowRow.id < before)


def in_use(session: Session) -> Iterator[str]:
    """The digests of the reservoirs that the next runs go on from."""
    for drafter_id in session.scalars(select(DrafterRow.id)).all():
        if last := _newest(session, WindowRow.drafter_id == drafter_id):
            yield last.sha256


def _newest(session: Session, *conditions: ColumnElement[bool]) -> Filled | None:
    found = (
        select(TrainingRow.window_id, TrainingRow.inputs)
        .join(WindowRow, WindowRow.id == TrainingRow.window_id)
        .where(*conditions)
        .order_by(TrainingRow.window_id.desc(), TrainingRow.id.desc())
        .limit(LOOK_BACK)
    )
    for window_id, inputs in session.execute(found).tuples():
        if digest := (inputs or {}).get("reservoir_sha256"):
            return Filled(window_id, digest)
    return None


def training_records(engine: Engine, drafter: str, first: int, before: int, since: datetime) -> list[Kept]:
    """The training records of the windows from `first` up to `before`, kept at `since` or later; by window."""
    with reading(engine) as session:
        found = (
            select(WindowRecordRow.record_id, WindowRow.id, WindowRecordRow.workload, WindowRow.created_at)
            .join(WindowRow, WindowRow.id == WindowRecordRow.window_id)
            .where(WindowRow.drafter_id == lookup.drafter_row(session, drafter).id, WindowRecordRow.part == "training")
            .where(WindowRow.id >= first, WindowRow.id < before, WindowRow.created_at >= since)
            .order_by(WindowRow.id, WindowRecordRow.record_id)
        )
        return [Kept(*row[:3], row[3].timestamp()) for row in session.execute(found).tuples()]


def still_there(engine: Engine, kept: Sequence[Kept]) -> list[Kept]:
    """Those whose record was not purged and whose window was not deleted."""
    found: set[tuple[str, int]] = set()
    with reading(engine) as session:
        for start in range(0, len(kept), BATCH):
            ids = [k.record_id for k in kept[start : start + BATCH]]
            rows = (
                select(WindowRecordRow.record_id, WindowRecordRow.window_id)
                .join(WindowRow, WindowRow.id == WindowRecordRow.window_id)
                .where(WindowRecordRow.record_id.in_(ids), WindowRow.deleted_at.is_(None))
            )
            found.update(session.execute(rows).tuples())
    return [k for k in kept if (k.record_id, k.window_id) in found]
