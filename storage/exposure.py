"""Which versions learnt from a tenant's records, directly or through an ancestor.

Read from the lineage: a training run names its windows and what it replayed; whose records those are stands in the
record rows, and a purge, which deletes these, keeps the counts. So the answer is the same before and after a purge.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.tables import PointerRow, PurgeRow, TrainingRow, VersionRow, WindowPurgeRow, WindowRecordRow


@dataclass(frozen=True)
class Exposed:
    """A version that learnt from the tenant's records."""

    id: int
    drafter: str  # name
    number: int
    records: int  # of the tenant's, among those that its own run was trained on
    parent: int | None  # number, where that one was exposed too
    live: bool
    canary: bool
    parent_drafter: str = ""  # name, where the parent is another drafter's: routing copied it

    @property
    def how(self) -> str:
        """In a phrase: through records of its own, through its parent, or both."""
        own = f"trained on {self.records} of the records" if self.records else ""
        of = f" of {self.parent_drafter}" if self.parent_drafter else ""
        inherited = f"descends from version {self.parent}{of}" if self.parent is not None else ""
        return " and ".join(part for part in (own, inherited) if part)


def exposed(session: Session, tenant: str) -> list[Exposed]:
    """By drafter and number."""
    rows = select(WindowRecordRow.window_id, WindowRecordRow.record_id)
    learnt_from = rows.where(WindowRecordRow.tenant == tenant, WindowRecordRow.part == "training")
    direct = Counter(trained_on(session, list(session.execute(learnt_from).tuples())))
    purged = select(WindowPurgeRow.trained).join(PurgeRow).where(PurgeRow.tenant == tenant)
    for counts in session.scalars(purged):
        direct.update({int(version): int(count) for version, count in counts.items()})
    points = {row.drafter_id: row for row in session.scalars(select(PointerRow))}
    found: dict[int, Exposed] = {}
    for row in session.scalars(select(VersionRow).order_by(VersionRow.drafter_id, VersionRow.number)):
        if direct[row.id] or row.parent_id in found:
            found[row.id] = _exposed(row, direct[row.id], found, points[row.drafter_id])
    return list(found.values())


def trained_on(session: Session, records: Collection[tuple[int, str]]) -> Counter[int]:
    """How many of these training records, as (window, record id), each version was trained on; by version id.

    A run learns from all of its own window, and from those records of earlier ones that its row names.
    """
    by_window = Counter(window for window, _ in records)
    ids = {record_id for _, record_id in records}
    counts: Counter[int] = Counter()
    if not records:
        return counts
    runs = select(TrainingRow.version_id, TrainingRow.window_id, TrainingRow.inputs)
    later = runs.where(TrainingRow.version_id.is_not(None), TrainingRow.window_id >= min(by_window))
    for version, window, inputs in session.execute(later).tuples():
        assert version is not None
        counts[version] += by_window[window] + len(ids.intersection((inputs or {}).get("replayed", ())))
    return +counts


def _exposed(row: VersionRow, records: int, found: Mapping[int, Exposed], points: PointerRow) -> Exposed:
    parent = found.get(row.parent_id) if row.parent_id is not None else None
    return Exposed(
        id=row.id,
        drafter=row.drafter.name,
        number=row.number,
        records=records,
        parent=parent.number if parent else None,
        live=points.live_id == row.id,
        canary=points.canary_id == row.id,
        parent_drafter=parent.drafter if parent and parent.drafter != row.drafter.name else "",
    )
