"""Canaries: a candidate that serves a share of the requests while the live version keeps the rest.

It goes out after the gate, and the watch that opens with it compares the two. It ends by a promotion or by a recall,
each one transaction with its event, audit row, message and the end of the watch. Any other move of the pointer
recalls it, and none but an operator's is made while it is out: so the live version it is judged against stays.
"""

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from storage import lookup, marks, pointer, quarantine, watches
from storage.jobs import Lease, writing
from storage.pointer import CanaryOut, PointerMoved
from storage.tables import PointerRow, VersionRow
from storage.views import Pointer, Version

__all__ = ["Canaries", "CanaryOut"]

MOST = 0.5  # share of the requests: the live version serves at least as many


class Canaries:
    def __init__(self, engine: Engine, lease: Lease | None = None) -> None:
        """With a lease every write first checks that the job is still ours."""
        self.engine, self.lease = engine, lease

    def send_out(self, candidate: Version, expecting: Version, share: float, actor: str, reason: str) -> Pointer:
        """Send that share of the requests to `candidate`; a no-op where it is out, or live, already.

        Raises `CanaryOut` where another one is out, and else whatever a promotion would.
        """
        if not 0.0 < share <= MOST:
            raise ValueError(f"a canary's share lies above 0 and up to {MOST}, not {share}")
        with writing(self.engine, self.lease) as session:
            version = session.get_one(VersionRow, candidate.id)
            points = pointer.lock(session, version.drafter_id)
            if version.id not in (points.live_id, points.canary_id):
                _check(session, points, version, expecting)
                live = session.get_one(VersionRow, expecting.id)
                generation = pointer.send_out(session, version, live, actor, reason)
                watches.start(session, version, live, generation, 1.0 - share, canary=True)
                session.flush()
            return lookup.pointer_of(session, version.drafter_id)

    def promote(
        self, canary: Version, expecting: Version, state: str, actor: str, reason: str, holdback: float = 0.0
    ) -> Pointer:
        """Make the canary live, for what its watch found ("safe" or "ended"); a no-op where it is out no more."""
        with writing(self.engine, self.lease) as session:
            version = session.get_one(VersionRow, canary.id)
            points = pointer.lock(session, version.drafter_id)
            if points.canary_id == version.id and points.live_id == expecting.id:
                marks.check_servable(session, version)
                watches.stop(session, version.drafter_id, state, reason)
                pointer.make_live(session, version, session.get_one(VersionRow, expecting.id), actor, reason, holdback)
            return lookup.pointer_of(session, version.drafter_id)

    def recall(self, canary: Version, state: str, actor: str, reason: str) -> Pointer:
        """End the canary without a promotion and without blame; a no-op where it is out no more."""
        with writing(self.engine, self.lease) as session:
            version = session.get_one(VersionRow, canary.id)
            points = pointer.lock(session, version.drafter_id)
            if points.canary_id == version.id:
                pointer.recall(session, points, state, actor, reason)
            return lookup.pointer_of(session, version.drafter_id)


def _check(session: Session, points: PointerRow, version: VersionRow, expecting: Version) -> None:
    pointer.check_canary(session, points, version)
    marks.check_servable(session, version)
    quarantine.check(session, version)
    if points.live_id != expecting.id:
        live = session.get_one(VersionRow, points.live_id)
        raise PointerMoved(f"version {live.number} of {version.drafter.name} is live, not version {expecting.number}")
