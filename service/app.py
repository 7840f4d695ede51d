"""The serving application: OpenAI's API, health, metrics and the operator's routes over parts already built.

The composition root (cli) builds the parts, starts engine and follower, runs this application with uvicorn,
and stops them after it; nothing here starts or stops anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import Engine as Database
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter.target import Target
from adapter.typical import Typical
from service import openai_errors, operator_api
from service.engine.engine import Engine
from service.guard import Guard
from service.metrics import Metrics
from service.openai_api import Served, openai_router
from storage.config import setting

ANYWHERE = {"0.0.0.0", "::", ""}


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens and by what names it goes."""

    host: str = setting("127.0.0.1", "address to listen on; the default is this machine only")
    port: int = setting(8765, "port to listen on")
    hosts: str = setting("", "further host names by which operators reach the server, separated by commas")
    model_name: str = setting("", "model name that clients ask for; empty: the target's")
    body_limit: int = setting(8 * 1024 * 1024, "bytes that a request's body may have; larger ones get HTTP 413")

    @property
    def names(self) -> frozenset[str]:
        """Host names under which operator routes answer, besides loopback's."""
        given = {name.strip().lower() for name in self.hosts.split(",")} | {self.host.lower()}
        return frozenset(given - ANYWHERE)


def build_app(
    target: Target,
    engine: Engine,
    metrics: Metrics,
    database: Database,
    drafter: Callable[[], str],
    config: ServeConfig,
    holdback: float = 0.0,
    typical: Typical | None = None,
) -> FastAPI:
    """The application that serves `target` through `engine`; operator routes are about `drafter()` (its name).

    `holdback` is the share of requests that stays on the version before when an operator promotes one here, `typical`
    the lossy rule that requests may ask for.
    """
    app = FastAPI(title="redraft", docs_url=None, redoc_url=None)
    app.add_middleware(DeclaredLength, limit=config.body_limit)
    openai_errors.install(app)
    operator_api.install(app)
    served = Served(target, engine, config.model_name or target.files.name, typical)
    for router in (
        openai_router(served),
        operator_api.operator_router(database, drafter, Guard(database, config.names), engine.governor, holdback),
        health_router(engine),
        metrics_router(metrics),
    ):
        app.include_router(router, max_body_size=config.body_limit)
    return app


class DeclaredLength:
    """Refuses a body that says it is over the limit, in OpenAI's form; FastAPI stops one that does not say."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            message = f"a request's body may have {self._limit} bytes (REDRAFT_BODY_LIMIT)"
            await JSONResponse(openai_errors.error_body(413, message), 413)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def health_router(engine: Engine) -> APIRouter:
    """Liveness and readiness. Neither looks at Redis, the database or the drafter: serving needs none of them."""
    router = APIRouter(prefix="/health")

    def report() -> JSONResponse:
        figures: dict[str, Any] = {
            "live_version": engine.lanes.version(),
            "running": engine.running,
            "waiting": engine.waiting,
        }
        return JSONResponse({"status": "ok" if engine.alive else "stopped", **figures}, 200 if engine.alive else 503)

    @router.get("")
    async def health() -> JSONResponse:
        return report()

    @router.get("/live")
    async def live() -> JSONResponse:
        return report()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        return report()

    return router


def metrics_router(metrics: Metrics) -> APIRouter:
    """What Prometheus reads."""
    router = APIRouter()

    @router.get("/metrics")
    def figures() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
