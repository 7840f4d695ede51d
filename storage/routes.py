"""Routes: which drafter of a target proposes for which workload. A workload without a route has the general drafter.

Changed by an operator (`cli/route`) or by the machine (`worker/routing`), with audit row and message to the servers in
the same transaction; servers look at the generation together with their pointer. What an operator set, the machine
never changes. Who changes routes holds the row of the target's generation, so that changes take turns.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Engine, delete, select
from sqlalchemy.orm import Session

from storage import audit, lookup, outbox
from storage.database import insert, now, reading, transaction
from storage.tables import DrafterRow, OwnDrafterRow, RouteRow, RoutingRow, StandingRow

MANUAL, LEARNED, NOVEL = "manual", "learned", "novel"
GENERAL = ""  # a route's drafter: the general one, whichever that is


class RouteRefused(ValueError):
    """A route that cannot be: its drafter is retired, or was made for another target."""


class RouteIsManual(RuntimeError):
    """An operator set the route: the machine leaves it as it is."""


@dataclass(frozen=True)
class Route:
    workload: str
    drafter: str  # name; "" where an operator said that the general drafter proposes for it
    cause: str  # manual, learned, novel: who set it, or why
    actor: str
    at: datetime  # since when
    weights: Mapping[str, float] = field(default_factory=dict)  # by drafter, as they are now; {} where none was scored
    reason: str = ""


class Routes:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def of(self, target_fingerprint: str) -> list[Route]:
        """All routes of a target, by workload."""
        found = select(RouteRow, DrafterRow.name).outerjoin(DrafterRow, DrafterRow.id == RouteRow.drafter_id)
        with reading(self.engine) as session:
            weights = _weights(session, target_fingerprint)
            rows = session.execute(
                found.where(RouteRow.target_fingerprint == target_fingerprint).order_by(RouteRow.workload)
            )
            return [
                Route(r.workload, name or GENERAL, r.cause, r.actor, r.at, weights.get(r.workload, {}), r.reason)
                for r, name in rows.tuples()
            ]

    def generation(self, target_fingerprint: str) -> int:
        """Grows with every change of the target's routes; 0 before the first one."""
        with reading(self.engine) as session:
            row = session.get(RoutingRow, target_fingerprint)
            return row.generation if row else 0

    def put(
        self, target_fingerprint: str, workload: str, drafter: str, cause: str, actor: str, reason: str = ""
    ) -> bool:
        """Route a workload to a drafter (by name; "": to the general one); whether that changed anything.

        Raises `RouteRefused`, `UnknownDrafter`, and `RouteIsManual` where the cause is none of an operator's and the
        present route is one.
        """
        with transaction(self.engine) as session:
            lock(session, target_fingerprint)
            owner = _drafter(session, drafter, target_fingerprint)
            return put(session, target_fingerprint, workload, owner, cause, actor, reason)

    def remove(self, target_fingerprint: str, workload: str, cause: str, actor: str, reason: str = "") -> bool:
        """Back to the general drafter, without a route; whether there was one. Raises `RouteIsManual` as `put` does."""
        with transaction(self.engine) as session:
            lock(session, target_fingerprint)
            return remove(session, target_fingerprint, workload, cause, actor, reason)


def lock(session: Session, target_fingerprint: str) -> RoutingRow:
    """The target's routing, which nobody else can change until the transaction ends."""
    fresh = insert(session, RoutingRow).values(target_fingerprint=target_fingerprint, generation=0)
    session.execute(fresh.on_conflict_do_nothing())
    found = select(RoutingRow).where(RoutingRow.target_fingerprint == target_fingerprint)
    return session.scalars(found.with_for_update()).one()


def put(
    session: Session,
    target_fingerprint: str,
    workload: str,
    drafter: DrafterRow | None,
    cause: str,
    actor: str,
    reason: str,
) -> bool:
    """`Routes.put` inside a transaction that holds the lock; None: the general drafter."""
    row = session.get(RouteRow, (target_fingerprint, workload))
    _check_manual(row, cause)
    before, after = _said(session, row), {"drafter": drafter.name if drafter else GENERAL, "cause": cause}
    if before == after:
        return False
    if drafter is not None:
        _note_general(session, target_fingerprint, drafter)
    if row is None:
        row = RouteRow(target_fingerprint=target_fingerprint, workload=workload)
    row.drafter_id, row.cause, row.actor, row.reason = drafter.id if drafter else None, cause, actor, reason
    row.at = now(session)
    session.add(row)
    session.flush()
    audit.append(session, actor, "route.put", _subject(target_fingerprint, workload), before, after, reason)
    _tell(session, target_fingerprint)
    return True


def remove(session: Session, target_fingerprint: str, workload: str, cause: str, actor: str, reason: str) -> bool:
    """`Routes.remove` inside a transaction that holds the lock."""
    row = session.get(RouteRow, (target_fingerprint, workload))
    if row is None:
        return False
    _check_manual(row, cause)
    before = _said(session, row)
    session.delete(row)
    session.flush()
    audit.append(session, actor, "route.remove", _subject(target_fingerprint, workload), before, {}, reason)
    _tell(session, target_fingerprint)
    return True


def forget(session: Session, drafter: DrafterRow, actor: str, reason: str) -> None:
    """The drafter is retired: its workloads go back to the general one, whoever had routed them, its weights away."""
    lock(session, drafter.target_fingerprint)
    routed = select(RouteRow.workload).where(RouteRow.drafter_id == drafter.id).order_by(RouteRow.workload)
    for workload in session.scalars(routed).all():
        remove(session, drafter.target_fingerprint, workload, MANUAL, actor, reason)
    session.execute(delete(StandingRow).where(StandingRow.drafter_id == drafter.id))


def general_among(session: Session, drafters: Collection[int]) -> set[int]:
    """Which of these drafters, by id, may be the general one: those that no route names and routing did not make.

    Where that leaves several, the one that was general when routing began; where it leaves none, all.
    """
    left = set(drafters) - _special(session) or set(drafters)
    noted = left.intersection(session.scalars(select(RoutingRow.general_id)))
    return noted if len(left) > 1 and noted else left


def _special(session: Session) -> set[int | None]:
    """Ids of the drafters that are for some workloads only."""
    return {*session.scalars(select(RouteRow.drafter_id)), *session.scalars(select(OwnDrafterRow.drafter_id))}


def _note_general(session: Session, target_fingerprint: str, routed: DrafterRow) -> None:
    """Before a route is set: the general drafter is the only other one that is for all workloads, where that is so."""
    row = session.get_one(RoutingRow, target_fingerprint)
    present = DrafterRow.target_fingerprint == target_fingerprint, DrafterRow.retired_at.is_(None)
    others = set(session.scalars(select(DrafterRow.id).where(*present))) - _special(session) - {routed.id}
    if row.general_id is None and len(others) == 1:
        row.general_id = others.pop()


def _drafter(session: Session, name: str, target_fingerprint: str) -> DrafterRow | None:
    if name == GENERAL:
        return None
    row = lookup.drafter_row(session, name)
    if row.retired_at is not None:
        raise RouteRefused(f"drafter {name} is retired: route to another one")
    if row.target_fingerprint != target_fingerprint:
        raise RouteRefused(f"drafter {name} was made for another target ({row.target_fingerprint[:12]})")
    return row


def _check_manual(row: RouteRow | None, cause: str) -> None:
    if row is not None and row.cause == MANUAL and cause != MANUAL:
        raise RouteIsManual(f"workload {row.workload} was routed by {row.actor} on {row.at:%F %T} UTC: it stays so")


def _said(session: Session, row: RouteRow | None) -> dict[str, str]:
    if row is None:
        return {}
    name = session.get_one(DrafterRow, row.drafter_id).name if row.drafter_id is not None else GENERAL
    return {"drafter": name, "cause": row.cause}


def _tell(session: Session, target_fingerprint: str) -> None:
    row = session.get_one(RoutingRow, target_fingerprint)
    row.generation += 1
    payload = {"target": target_fingerprint, "generation": row.generation}
    outbox.add(session, outbox.ROUTES_TOPIC, payload)


def _subject(target_fingerprint: str, workload: str) -> str:
    return f"target/{target_fingerprint}/workload/{workload}"


def _weights(session: Session, target_fingerprint: str) -> dict[str, dict[str, float]]:
    """By workload: the weights of its drafters."""
    found = select(StandingRow.workload, DrafterRow.name, StandingRow.weight).join(
        DrafterRow, DrafterRow.id == StandingRow.drafter_id
    )
    by_workload: dict[str, dict[str, float]] = {}
    for workload, name, weight in session.execute(
        found.where(StandingRow.target_fingerprint == target_fingerprint)
    ).tuples():
        by_workload.setdefault(workload, {})[name] = weight
    return by_workload
