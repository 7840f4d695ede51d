"""Drafters of their own: those that routing makes for one workload each, and takes back when it has no use for them.

One is made as a copy of the general drafter's live version, which its version 1 descends from, and routed to in the
same transaction. One that is given back is retired: its versions and history are kept.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from storage import audit, lookup, pointer, routes, standings
from storage.database import exclusive, now, reading, transaction
from storage.registry import NAMES_LOCK
from storage.tables import DrafterRow, OwnDrafterRow, PointerRow, RouteRow, VersionRow, WindowRow


@dataclass(frozen=True)
class OwnDrafter:
    name: str
    workload: str
    at: datetime  # when it was made
    idle_hours: float  # since then, or since it last got a window


class OwnDrafters:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def of(self, target_fingerprint: str) -> list[OwnDrafter]:
        """Those of a target that are not retired, oldest first."""
        with reading(self.engine) as session:
            return _present(session, target_fingerprint)

    def make(
        self,
        general: str,
        workload: str,
        at_most: int,
        name: Callable[[Collection[str]], str],
        actor: str,
        reason: str,
    ) -> str | None:
        """Give a workload its own drafter; its name. None where it has a route, or there are `at_most` already.

        `name` is asked for one that is not among those taken.
        """
        with transaction(self.engine) as session:
            exclusive(session, NAMES_LOCK)
            parent = _live(session, general)
            target = parent.drafter.target_fingerprint
            routes.lock(session, target)
            if len(_present(session, target)) >= at_most or session.get(RouteRow, (target, workload)) is not None:
                return None
            made = _copy(session, parent, name(set(session.scalars(select(DrafterRow.name)))), actor)
            session.add(OwnDrafterRow(drafter_id=made.id, workload=workload, at=now(session)))
            after = {"workload": workload, "of": f"version {parent.number} of {general}"}
            audit.append(session, actor, "drafter.own", f"drafter/{made.name}", {}, after, reason)
            routes.put(session, target, workload, made, routes.NOVEL, actor, reason)
            return made.name

    def give_back(self, own: OwnDrafter, actor: str, reason: str) -> bool:
        """Retire it, with its routes, and begin its workload's standings anew.

        False where it is retired already, or an operator routes something to it.
        """
        with transaction(self.engine) as session:
            row = lookup.drafter_row(session, own.name)
            routes.lock(session, row.target_fingerprint)
            session.refresh(row)
            manual = select(func.count()).where(RouteRow.drafter_id == row.id, RouteRow.cause == routes.MANUAL)
            if row.retired_at is not None or session.scalar(manual):
                return False
            row.retired_at = now(session)
            audit.append(session, actor, "drafter.retire", f"drafter/{own.name}", {}, {"retired": True}, reason)
            routes.forget(session, row, actor, reason)
            standings.begin_anew(session, row.target_fingerprint, own.workload)
            return True


def _present(session: Session, target_fingerprint: str) -> list[OwnDrafter]:
    last = select(func.max(WindowRow.created_at)).where(WindowRow.drafter_id == DrafterRow.id).scalar_subquery()
    found = (
        select(DrafterRow.name, OwnDrafterRow.workload, OwnDrafterRow.at, last)
        .join(DrafterRow, DrafterRow.id == OwnDrafterRow.drafter_id)
        .where(DrafterRow.target_fingerprint == target_fingerprint, DrafterRow.retired_at.is_(None))
        .order_by(OwnDrafterRow.drafter_id)
    )
    moment = now(session)
    return [
        OwnDrafter(name, workload, at, (moment - max(at, window or at)).total_seconds() / 3600)
        for name, workload, at, window in session.execute(found).tuples()
    ]


def _live(session: Session, drafter: str) -> VersionRow:
    points = session.get_one(PointerRow, lookup.drafter_row(session, drafter).id)
    return session.get_one(VersionRow, points.live_id)


def _copy(session: Session, parent: VersionRow, name: str, actor: str) -> DrafterRow:
    """A drafter like the parent's, whose version 1 is the parent's weights."""
    like = parent.drafter
    made = DrafterRow(
        name=name, kind=like.kind, target_fingerprint=like.target_fingerprint,
        tokenizer_fingerprint=like.tokenizer_fingerprint, config=like.config, created_at=now(session),
    )  # fmt: skip
    pointer.start(session, made, parent.weights_sha256, parent.size_bytes, actor, parent)
    return made
