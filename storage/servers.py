"""The servers that follow a drafter: which generation each has applied, and when it was last heard of.

A server's beat is also its acknowledgement of a move of the pointer; `redraft rollback` waits for these.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Engine, delete, select

from storage.capabilities import Capabilities
from storage.database import insert, now, reading, transaction
from storage.tables import ServerRow

WORKERS = ("trainer", "housekeeper", "beat")  # the host kinds of the worker's processes, which beat here as well


@dataclass(frozen=True)
class Server:
    id: str
    host_kind: str  # reference, vllm, sidecar, ...
    drafter: str  # name
    generation: int  # applied, not just heard of
    version: int  # number
    error: str  # why the newest generation is not applied; empty when it is
    started_at: datetime
    last_seen: datetime
    target_fingerprint: str = ""  # of what it serves; empty where it does not say
    capabilities: Capabilities | None = None  # None where it does not say


class Servers:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def beat(
        self,
        server_id: str,
        host_kind: str,
        drafter: str,
        generation: int,
        version: int,
        error: str = "",
        target_fingerprint: str = "",
        capabilities: Capabilities | None = None,
    ) -> None:
        """Say that the server is alive, what it serves, and what it can do."""
        with transaction(self.engine) as session:
            moment = now(session)
            state = {
                "host_kind": host_kind, "drafter": drafter, "generation": generation, "version": version,
                "error": error, "last_seen": moment, "target_fingerprint": target_fingerprint or None,
                "capabilities": capabilities.to_dict() if capabilities else None,
            }  # fmt: skip
            row = insert(session, ServerRow).values(id=server_id, started_at=moment, **state)
            session.execute(row.on_conflict_do_update(index_elements=["id"], set_=state))

    def live(self, drafter: str, within_seconds: float = 15) -> list[Server]:
        """The drafter's servers that were heard of lately, by id."""
        return self._heard_of(ServerRow.drafter == drafter, within_seconds)

    def hosts(self, within_seconds: float = 15) -> list[Server]:
        """The servers of all drafters that were heard of lately, by drafter and id; no processes of the worker."""
        return self._heard_of(ServerRow.host_kind.not_in(WORKERS), within_seconds)

    def _heard_of(self, which: ColumnElement[bool], within_seconds: float) -> list[Server]:
        with reading(self.engine) as session:
            since = now(session) - timedelta(seconds=within_seconds)
            found = select(ServerRow).where(which, ServerRow.last_seen >= since)
            return [_server(row) for row in session.scalars(found.order_by(ServerRow.drafter, ServerRow.id))]

    def gone(self, server_id: str) -> None:
        """The server stopped in good order: nobody need wait for it."""
        with transaction(self.engine) as session:
            session.execute(delete(ServerRow).where(ServerRow.id == server_id))

    def forget(self, older_than: timedelta) -> int:
        """Drop the rows of servers and worker processes that were not heard of for so long; how many."""
        with transaction(self.engine) as session:
            ended = delete(ServerRow).where(ServerRow.last_seen < now(session) - older_than)
            return len(session.scalars(ended.returning(ServerRow.id)).all())


def _server(row: ServerRow) -> Server:
    return Server(
        row.id,
        row.host_kind,
        row.drafter,
        row.generation,
        row.version,
        row.error,
        row.started_at,
        row.last_seen,
        row.target_fingerprint or "",
        Capabilities.from_dict(row.capabilities),
    )
