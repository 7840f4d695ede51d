"""The operator's routes under /redraft: review versions, their history and the servers; promote and roll back.

Every route needs the operator key, by a dependency of the router itself, so that a route added later cannot
be forgotten.
"""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from service.engine.governor import Governor
from service.guard import Guard
from service.openai_errors import error_body
from storage.access import OPERATOR
from storage.database import now, reading
from storage.history import AcceptanceRow, by_version, history
from storage.registry import (
    NothingToRollBackTo,
    Pointer,
    PointerMoved,
    Quarantined,
    Registry,
    UnknownDrafter,
    UnknownVersion,
    VersionRefused,
    WrongDrafter,
)
from storage.servers import Servers
from storage.watches import Watches

log = structlog.get_logger()
REFUSALS: dict[type[Exception], int] = {
    UnknownDrafter: 404,
    UnknownVersion: 404,
    WrongDrafter: 409,
    VersionRefused: 409,
    PointerMoved: 409,
    Quarantined: 409,
    NothingToRollBackTo: 409,
}
Reason = Annotated[str, Field(min_length=1, max_length=500)]
Json = dict[str, Any]


class Order(BaseModel):
    """What an operator sends; nothing else is taken."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Promotion(Order):
    version: int = Field(ge=1)
    reason: Reason
    quarantined: bool = False  # take the version out of quarantine, where it is in it


class Rollback(Order):
    to: int | None = Field(None, ge=1)  # None: what was before the canary, where one is out, else the version before
    reason: Reason


def operator_router(
    database: Engine, served: Callable[[], str], guard: Guard, governor: Governor | None = None, holdback: float = 0.0
) -> APIRouter:
    """The routes about the drafter that this server follows; it may be attached later, so its name is asked for."""
    router = APIRouter(prefix="/redraft", dependencies=[Depends(guard)])
    registry, servers = Registry(database), Servers(database)

    @router.get("/versions")
    def versions() -> Json:
        return {"pointer": _pointer(registry.pointer(served())), "versions": registry.versions(served())}

    @router.get("/versions/{number}")
    def version(number: int) -> Json:
        found = registry.version(served(), number)
        summary = next(s for s in registry.versions(served()) if s.version.number == number)
        live = [i for i in registry.intervals(served()) if i.version == number]
        return {**asdict(summary), "training": registry.training(found), "live": live}

    @router.get("/history")
    def acceptance(hours: Annotated[float, Query(gt=0, le=24 * 366)] = 24) -> Json:
        with reading(database) as session:
            since = now(session) - timedelta(hours=hours)
        rows, totals = history(database, served(), since), by_version(database, served())
        return {"since": since, "rows": [_row(r) for r in rows], "totals": [_row(r) for r in totals]}

    @router.get("/servers")
    def live_servers() -> Json:
        generation = registry.pointer(served()).generation
        found = [{**asdict(s), "applied": s.generation == generation} for s in servers.live(served())]
        return {"generation": generation, "servers": found}

    @router.get("/governor")
    def decisions() -> Json:
        """What this server's own engine does; other servers have other traffic and other machines."""
        found = governor.decisions() if governor else []
        return {"on": governor is not None, "decisions": [{**asdict(c), "speed_up": c.speed_up} for c in found]}

    @router.get("/events")
    def events(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Json:
        return {"events": registry.events(served(), limit)}

    @router.get("/watch")
    def watches(limit: Annotated[int, Query(ge=1, le=100)] = 10) -> Json:
        return {"watches": Watches(database).recent(served(), limit)}

    @router.post("/promote")
    def promote(order: Promotion) -> Json:
        candidate = registry.version(served(), order.version)
        live = registry.live(served())
        moved = registry.promote(candidate, live, OPERATOR, order.reason, holdback, order.quarantined, recall=True)
        log.info("pointer.promoted", drafter=served(), version=order.version, generation=moved.generation)
        return _pointer(moved)

    @router.post("/rollback")
    def rollback(order: Rollback) -> Json:
        moved = registry.rollback(served(), order.to, OPERATOR, order.reason)
        log.info("pointer.rolled_back", drafter=served(), version=moved.live.number, generation=moved.generation)
        return _pointer(moved)

    return router


def install(app: FastAPI) -> None:
    """Give the registry's refusals their HTTP status, and a database that is away a 503."""
    for kind, status in REFUSALS.items():
        app.exception_handler(kind)(_refusal(status))
    app.exception_handler(OperationalError)(_database_away)


def _refusal(status: int) -> Any:
    async def refuse(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(status, str(error)), status)

    return refuse


async def _database_away(request: Request, error: OperationalError) -> JSONResponse:
    log.warning("database.unreachable", error=type(error.orig).__name__)
    message = "the database cannot be reached: serving goes on, operators must wait; see `redraft doctor`"
    return JSONResponse(error_body(503, message), 503, {"Retry-After": "5"})


def _pointer(pointer: Pointer) -> Json:
    return {
        "drafter": pointer.drafter,
        "generation": pointer.generation,
        "live": pointer.live.number,
        "previous": pointer.previous.number if pointer.previous else None,
        "canary": pointer.canary.number if pointer.canary else None,
    }


def _row(row: AcceptanceRow) -> Json:
    rates = {"acceptance_rate": row.acceptance_rate, "acceptance_length": row.acceptance_length}
    return {**asdict(row), **rates, "lossless": row.lossless}
