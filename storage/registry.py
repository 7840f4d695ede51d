"""The registry: drafters, their versions, what is live, and the moves between them. SQL is the only truth.

Serving reads `pointer`; the trainer adds candidates, records the gate's answers and promotes; the operator
promotes and rolls back. With a `lease` every write first checks that the job is still ours (`storage/jobs`).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select

from storage import audit, choosing, lineage, lookup, marks, pointer, quarantine, routes
from storage.choosing import WrongDrafter
from storage.database import exclusive, now, reading
from storage.decisions import Decision, Evaluation, TrainingReport
from storage.jobs import Lease, writing
from storage.lookup import UnknownDrafter, UnknownVersion
from storage.marks import VersionRefused
from storage.pointer import CanaryOut, PointerMoved
from storage.quarantine import Quarantined
from storage.tables import DrafterRow, PointerRow, SuccessorRow, TrainingRow, VersionRow
from storage.views import (
    Drafter,
    Event,
    Interval,
    Pointer,
    Version,
    VersionSummary,
    drafter_view,
    summary_view,
    version_view,
)

__all__ = [
    "CanaryOut", "Drafter", "DrafterExists", "Event", "Interval", "NothingToRollBackTo", "Pointer", "PointerMoved",
    "Quarantined", "Registry", "UnknownDrafter", "UnknownVersion", "Version", "VersionRefused",
    "VersionSummary", "WrongDrafter",
]  # fmt: skip
NAMES_LOCK = 0x7265647261667403  # see database.exclusive


class DrafterExists(ValueError):
    """A drafter of this name is there already."""


class NothingToRollBackTo(RuntimeError):
    """The live version has no predecessor."""


class Registry:
    def __init__(self, engine: Engine, lease: Lease | None = None) -> None:
        self.engine = engine
        self.lease = lease

    def create_drafter(
        self,
        name: str,
        kind: str,
        target_fingerprint: str,
        tokenizer_fingerprint: str,
        config: dict[str, Any],
        weights_sha256: str,
        size_bytes: int,
        actor: str,
        predecessor: str = "",
    ) -> Version:
        """A drafter with version 1, live as generation 1; raises `DrafterExists`.

        With a `predecessor` it is chosen in that one's place for its own target.
        """
        with writing(self.engine, self.lease) as session:
            exclusive(session, NAMES_LOCK)
            if session.scalar(select(DrafterRow.id).where(DrafterRow.name == name)) is not None:
                raise DrafterExists(f"there is a drafter {name!r} already: choose another name")
            drafter = DrafterRow(
                name=name, kind=kind, target_fingerprint=target_fingerprint,
                tokenizer_fingerprint=tokenizer_fingerprint, config=config, created_at=now(session),
            )  # fmt: skip
            first = pointer.start(session, drafter, weights_sha256, size_bytes, actor)
            if predecessor:
                before = lookup.drafter_row(session, predecessor)
                session.add(SuccessorRow(drafter_id=drafter.id, predecessor_id=before.id))
            return version_view(first)

    def drafter(self, name: str) -> Drafter:
        """The drafter of this name, retired or not; raises `UnknownDrafter`."""
        with reading(self.engine) as session:
            return drafter_view(lookup.drafter_row(session, name))

    def drafters(self, include_retired: bool = False) -> list[Drafter]:
        with reading(self.engine) as session:
            rows = session.scalars(select(DrafterRow).order_by(DrafterRow.id))
            return [drafter_view(row) for row in rows if include_retired or row.retired_at is None]

    def choose(self, name: str, target_fingerprint: str | None = None) -> Drafter:
        """The drafter called `name`; for "" the general one: the only one of this target that is for all workloads.

        One that was made for another target gives way to its successor for this one, where it has one. Retired ones
        cannot be chosen. Those that are routed, or were made by routing, are for some workloads only.
        """
        with reading(self.engine) as session:
            if name:
                return drafter_view(choosing.named(session, name, target_fingerprint))
            return drafter_view(choosing.general(session, target_fingerprint))

    def retire_drafter(self, name: str, actor: str) -> None:
        """Take the drafter out of every list that is chosen from; its versions and history are kept."""
        with writing(self.engine, self.lease) as session:
            row = lookup.drafter_row(session, name)
            if row.retired_at is None:
                routes.forget(session, row, actor, f"drafter {name} was retired")
                row.retired_at = now(session)
                audit.append(session, actor, "drafter.retire", f"drafter/{name}", {}, {"retired": True}, "")

    def live(self, drafter: str) -> Version:
        return self.pointer(drafter).live

    def pointer(self, drafter: str) -> Pointer:
        with reading(self.engine) as session:
            return lookup.pointer_of(session, lookup.drafter_row(session, drafter).id)

    def version(self, drafter: str, number: int) -> Version:
        with reading(self.engine) as session:
            return version_view(lookup.version_row(session, drafter, number))

    def versions(self, drafter: str) -> list[VersionSummary]:
        """All versions by number, each with its state, the reason for it and its evaluation."""
        with reading(self.engine) as session:
            drafter_id = lookup.drafter_row(session, drafter).id
            rows = session.scalars(lookup.of_drafter(drafter_id).order_by(VersionRow.number)).all()
            events, scores = lookup.last_events(session, drafter_id), lookup.evaluations(session, drafter_id)
            points, marked = session.get_one(PointerRow, drafter_id), marks.of_drafter(session, drafter_id)
            why = quarantine.reasons(session, drafter_id)
            return [
                summary_view(
                    row, points, events.get(row.id), scores.get(row.id), marked.get(row.id, {}), why.get(row.id, "")
                )
                for row in rows
            ]

    def training(self, version: Version) -> TrainingReport | None:
        """The run that made a version; None for a version 1."""
        with reading(self.engine) as session:
            row = session.scalar(select(TrainingRow).where(TrainingRow.version_id == version.id))
            return lineage.training_report(row) if row else None

    def candidate_of(self, window_id: int, parent_id: int | None = None) -> Version | None:
        """The version made from this window and parent (None: the newest of any), whatever became of it."""
        with reading(self.engine) as session:
            row = lookup.made_from(session, window_id, parent_id)
            return version_view(row) if row else None

    def add_candidate(
        self, parent: Version, weights_sha256: str, size_bytes: int, window_id: int, training: TrainingReport
    ) -> Version:
        """The next version; the one that is there already where (parent, window) was trained before."""
        with writing(self.engine, self.lease) as session:
            drafter = lookup.drafter_row(session, parent.drafter, lock=True)
            made = lookup.made_from(session, window_id, parent.id)
            if made is not None:
                return version_view(made)
            lineage.check_unchanged(session, parent.id, training.inputs)
            row = VersionRow(
                drafter=drafter, number=lookup.newest_number(session, drafter.id) + 1, window_id=window_id,
                parent=session.get_one(VersionRow, parent.id), weights_sha256=weights_sha256,
                size_bytes=size_bytes, created_at=now(session),
            )  # fmt: skip
            session.add(row)
            session.flush()
            lineage.add_training(session, parent.id, window_id, row.id, training)
            return version_view(row)

    def record_training_failure(self, parent: Version, window_id: int, training: TrainingReport) -> None:
        with writing(self.engine, self.lease) as session:
            lineage.add_training(session, parent.id, window_id, None, training)

    def record(self, candidate: Version, evaluation: Evaluation, decision: Decision) -> None:
        """Keep the gate's answer; a second one for the same candidate changes nothing."""
        with writing(self.engine, self.lease) as session:
            row = session.get_one(VersionRow, candidate.id)
            assert row.parent_id is not None, "a candidate has a parent"
            lineage.add_evaluation(session, row.id, row.parent_id, evaluation, decision)

    def promote(
        self,
        candidate: Version,
        expecting: Version,
        actor: str,
        reason: str,
        holdback: float = 0.0,
        quarantined: bool = False,
        recall: bool = False,
    ) -> Pointer:
        """Make `candidate` live if `expecting` is, else `PointerMoved`; a no-op where it is live already.

        That share of the requests stays on the version before, for as long as the watch that this opens goes on.
        Raises `Quarantined`, unless `quarantined` says that the version is to come out of it, and `CanaryOut` where
        another version is out as a canary, unless `recall` says that this ends it.
        """
        if candidate.drafter != expecting.drafter:
            raise WrongDrafter(f"a version of {candidate.drafter} cannot replace one of {expecting.drafter}")
        with writing(self.engine, self.lease) as session:
            to = lookup.version_row(session, candidate.drafter, candidate.number)
            points = pointer.lock(session, to.drafter_id)
            if points.live_id != to.id:
                marks.check_servable(session, to)
                if not recall:
                    pointer.check_canary(session, points, to)
                before = session.get_one(VersionRow, expecting.id)
                if quarantined:
                    quarantine.release(session, to, actor, reason)
                quarantine.check(session, to)
                pointer.make_live(session, to, before, actor, reason, holdback)
            return lookup.pointer_of(session, to.drafter_id)

    def rollback(self, drafter: str, to: int | None, actor: str, reason: str) -> Pointer:
        """Make version `to` live again, by default the one before; nothing happens if it is live already.

        A previous version that cannot be served any more is passed over for the one that was live before it. While a
        canary is out, going back by default is to recall that, as it was deployed last; the live version stays.
        """
        with writing(self.engine, self.lease) as session:
            points = pointer.lock(session, lookup.drafter_row(session, drafter).id)
            live = session.get_one(VersionRow, points.live_id)
            if to is None and points.canary_id is not None:
                pointer.recall(session, points, "overtaken", actor, reason)
                return lookup.pointer_of(session, points.drafter_id)
            if to is None and points.previous_id is None:
                raise NothingToRollBackTo(f"version {live.number} of {drafter} is live and replaced none")
            target = marks.fallback(session, points) if to is None else lookup.version_row(session, drafter, to)
            if target is None:
                raise NothingToRollBackTo(f"none of {drafter}'s earlier live versions can be served any more")
            if target is not live:
                marks.check_servable(session, target)
                quarantine.check(session, target)
                pointer.roll_back(session, target, live, actor, reason)
            return lookup.pointer_of(session, points.drafter_id)

    def take_back(self, version: Version, actor: str, reason: str) -> Pointer:
        """Roll `version` back for being worse, if it is live or out as a canary, and put it into quarantine.

        Several servers and the worker may find the same: the first one moves the pointer, for the others nothing
        happens. Without an earlier version that can be served the pointer stays, and only the quarantine is set.
        """
        with writing(self.engine, self.lease) as session:
            row = session.get_one(VersionRow, version.id)
            points = pointer.lock(session, row.drafter_id)
            if points.live_id == row.id:
                quarantine.put(session, row, actor, reason)
                target = marks.fallback(session, points)
                if target is not None:
                    pointer.take_back(session, target, row, actor, reason)
            elif points.canary_id == row.id:
                quarantine.put(session, row, actor, reason)
                pointer.recall(session, points, "worse", actor, reason)
            return lookup.pointer_of(session, row.drafter_id)

    def events(self, drafter: str, limit: int = 50) -> list[Event]:
        """The newest moves of the pointer first."""
        with reading(self.engine) as session:
            return lookup.events(session, lookup.drafter_row(session, drafter).id, limit)

    def intervals(self, drafter: str) -> list[Interval]:
        """What was live when, oldest first: without gaps and without overlaps."""
        with reading(self.engine) as session:
            return lookup.intervals(session, lookup.drafter_row(session, drafter).id)

    def live_at(self, drafter: str, when: datetime) -> Version | None:
        """The version that was live at `when` (aware); None before the drafter was made."""
        with reading(self.engine) as session:
            return lookup.live_at(session, lookup.drafter_row(session, drafter).id, when)
