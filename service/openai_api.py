"""OpenAI's API over the engine: chat completions, completions and models, whole or as a stream.

A request's way: body checked (openai_schema) -> token ids (prompts) -> generation (openai_request) -> engine
-> deltas -> OpenAI's wire format (openai_replies). A client that leaves frees its slot.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from adapter.target import Target
from service.deltas import Deltas
from service.engine.engine import Engine, PromptTooLong
from service.engine.generation import Delta, Generation
from service.engine.inbox import Busy
from service.openai_errors import ApiError, bad_request, error_body
from service.openai_replies import ChatReply, CompletionReply, Envelope
from service.openai_request import Asked, Body, Labels, generation
from service.openai_schema import ChatRequest, CompletionRequest
from service.prompts import chat_ids, completion_ids

log = structlog.get_logger()
RETRY = {"Retry-After": "1"}  # seconds
Reply = ChatReply | CompletionReply


@dataclass(frozen=True)
class Served:
    """What stands behind the routes."""

    target: Target
    engine: Engine
    model: str  # the name that clients ask for


def openai_router(served: Served) -> APIRouter:
    """The routes under /v1."""
    router = APIRouter(prefix="/v1")
    model = {
        "id": served.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "redraft",
        "max_model_len": served.engine.context,
    }

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, asked: Asked, request: Request) -> Response:
        _check(served, body, asked)
        ids = await run_in_threadpool(chat_ids, served.target, body)
        reply = ChatReply(_envelope(served, f"chatcmpl-{uuid4().hex}", body, asked, ids))
        return await _answer(served.engine, request, body, asked, reply)

    @router.post("/completions")
    async def completions(body: CompletionRequest, asked: Asked, request: Request) -> Response:
        _check(served, body, asked)
        ids = await run_in_threadpool(completion_ids, served.target, body)
        reply = CompletionReply(_envelope(served, f"cmpl-{uuid4().hex}", body, asked, ids))
        return await _answer(served.engine, request, body, asked, reply)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return model

    return router


def _check(served: Served, body: Body, asked: Labels) -> None:
    """What no single field can tell."""
    _check_model(served, body.model)
    if asked.draft_length is not None and asked.draft_length > served.engine.draft_length:
        raise bad_request(
            f"X-Redraft-Draft-Length is at most {served.engine.draft_length} on this server",
            "x-redraft-draft-length",
        )


def _check_model(served: Served, asked: str) -> None:
    if asked != served.model:
        message = f"no model {asked!r} here; this server serves {served.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _envelope(served: Served, request_id: str, body: Body, asked: Labels, ids: list[int]) -> Envelope:
    return Envelope(
        request_id=request_id,
        created=int(time.time()),
        model=served.model,
        fingerprint=f"fp_{served.target.files.fingerprint[:10]}",
        prompt_ids=ids,
        draft_length=served.engine.draft_length if asked.draft_length is None else asked.draft_length,
        include_usage=body.include_usage,
        return_token_ids=body.return_token_ids,
        return_metrics=body.return_metrics,
    )


async def _answer(engine: Engine, request: Request, body: Body, asked: Labels, reply: Reply) -> Response:
    """Hand the request to the engine, and its deltas to the client."""
    deltas, envelope = Deltas(), reply.envelope
    _submit(engine, generation(envelope.request_id, body, asked, envelope.prompt_ids, engine.context, deltas))

    def leave() -> None:
        if not deltas.finished:
            log.info("request.left", request_id=envelope.request_id)
            engine.cancel(envelope.request_id)

    if body.stream:
        return EventStream(_events(deltas, reply), leave)
    try:
        return _whole(await deltas.read_all(_disconnected(request)), reply)
    finally:
        leave()


def _submit(engine: Engine, asked: Generation) -> None:
    try:
        engine.submit(asked)
    except Busy as busy:
        message = f"the server is busy: {busy}; try again"
        raise ApiError(429, message, code="rate_limit_exceeded", headers=RETRY) from busy
    except PromptTooLong as error:
        raise bad_request(str(error), code="context_length_exceeded") from error


def _whole(deltas: list[Delta] | None, reply: Reply) -> Response:
    if deltas is None:
        return Response(status_code=499)  # nobody reads it: the client has left
    last = deltas[-1]
    if last.usage is None or last.finish_reason not in {"stop", "length"}:
        raise ApiError(*_failure(last))
    text = "".join(delta.text for delta in deltas)
    ids = [token for delta in deltas for token in delta.token_ids]
    return JSONResponse(reply.whole(text, ids, last.finish_reason, last.usage))


async def _events(deltas: Deltas, reply: Reply) -> AsyncIterator[str]:
    """Server-sent events. A failure midway is an event of its own: the status line has long gone out."""
    for chunk in reply.opening():
        yield _event(chunk)
    first = True
    async for delta in deltas.read():
        if delta.text or (delta.token_ids and reply.envelope.return_token_ids):
            yield _event(reply.piece(delta.text, delta.token_ids, first))
            first = False
        for chunk in _ending(delta, reply):
            yield _event(chunk)
    yield "data: [DONE]\n\n"


def _ending(delta: Delta, reply: Reply) -> list[dict[str, Any]]:
    """The chunks that follow the last delta; none after any other."""
    if delta.finish_reason is None:
        return []
    if delta.finish_reason in {"stop", "length"} and delta.usage is not None:
        return reply.closing(delta.finish_reason, delta.usage)
    return [error_body(*_failure(delta))]


def _failure(delta: Delta) -> tuple[int, str]:
    """The HTTP status and the message of a request that the engine gave up."""
    return 503 if delta.finish_reason == "cancelled" else 500, delta.error or "the request was cancelled"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone; its body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream that calls `leave` when it is over, however that came about."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
