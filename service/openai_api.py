"""OpenAI's API over the engine: chat completions, completions and models, whole or as a stream.

A request's way: body checked (openai_schema) -> token ids (prompts) -> generation (openai_request) -> engine
-> deltas -> OpenAI's wire format (openai_replies). A client that leaves frees its slot.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from adapter.spelling import NotSpelled, Spelling, spelling
from adapter.structured import GrammarConstraint
from adapter.target import Target
from adapter.typical import Typical
from service.deltas import Deltas
from service.engine.engine import Engine, PromptTooLong
from service.engine.generation import Delta, Generation
from service.engine.inbox import Busy
from service.openai_errors import ApiError, bad_request, error_body
from service.openai_replies import ChatReply, CompletionReply, Envelope
from service.openai_request import Asked, Body, Labels, check_tokens, generation, grammar_constraint, minimum_length
from service.openai_schema import ChatRequest, CompletionRequest
from service.prompts import chat_ids, completion_ids

log = structlog.get_logger()
RETRY = {"Retry-After": "1"}  # seconds
COMPILERS = 2
Reply = ChatReply | CompletionReply


@dataclass(frozen=True)
class Served:
    """What stands behind the routes."""

    target: Target
    engine: Engine
    model: str  # the name that clients ask for
    typical: Typical | None = None  # LOSSY: what requests may ask for; None: exact verification only

    @cached_property
    def spelling(self) -> Spelling:
        """What structured output and log-probabilities need; raises `NotSpelled`."""
        return spelling(self.target)

    @cached_property
    def compilers(self) -> ThreadPoolExecutor:
        """The threads that compile clients' grammars: few, so that these cannot take the machine from the engine."""
        return ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")


def openai_router(served: Served) -> APIRouter:
    """The routes under /v1."""
    router = APIRouter(prefix="/v1")
    with suppress(NotSpelled):
        _ = served.spelling  # made now, so that no request waits for it
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
        return await _answer(served, request, body, asked, reply)

    @router.post("/completions")
    async def completions(body: CompletionRequest, asked: Asked, request: Request) -> Response:
        _check(served, body, asked)
        ids = await run_in_threadpool(completion_ids, served.target, body)
        reply = CompletionReply(_envelope(served, f"cmpl-{uuid4().hex}", body, asked, ids))
        return await _answer(served, request, body, asked, reply)

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
    if asked.typical:
        _check_typical(served, body)
    check_tokens(body, served.target)


def _check_typical(served: Served, body: Body) -> None:
    """Nobody gets another text than the target's who did not ask for it on a server that was told to allow it."""
    if served.typical is None:
        raise bad_request(
            "typical acceptance is lossy: it changes the text. This server does not allow it "
            "(REDRAFT_TYPICAL_ACCEPTANCE)",
            "x-redraft-acceptance",
        )
    if body.seed is not None:
        raise bad_request(
            "a seed asks for a text that depends on no drafter, which typical acceptance cannot give; leave one out",
            "x-redraft-acceptance",
        )


def _check_model(served: Served, asked: str) -> None:
    if asked != served.model:
        message = f"no model {asked!r} here; this server serves {served.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _spelling(served: Served, param: str) -> Spelling:
    try:
        return served.spelling
    except NotSpelled as error:
        raise bad_request(f"{param} is not served: {error}", param) from error


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
        tokens_as_ids=body.return_tokens_as_token_ids,
        return_metrics=body.return_metrics,
        spelling=None if body.alternatives_wanted is None else _spelling(served, "logprobs"),
        typical=served.typical if asked.typical else None,
    )


async def _answer(served: Served, request: Request, body: Body, asked: Labels, reply: Reply) -> Response:
    """Hand the request to the engine, and its deltas to the client."""
    engine, deltas, envelope = served.engine, Deltas(), reply.envelope
    grammar = await _grammar(served, body)
    constraint = grammar or minimum_length(body, served.target)
    wanted = generation(
        envelope.request_id, body, asked, envelope.prompt_ids, engine.context, deltas, constraint, envelope.typical
    )
    _submit(engine, wanted)

    def leave() -> None:
        if not deltas.finished:
            log.info("request.left", request_id=envelope.request_id)
            engine.cancel(envelope.request_id)

    if body.stream:
        return EventStream(_events(deltas, reply, grammar), leave, envelope.headers)
    try:
        return _whole(await deltas.read_all(_disconnected(request)), reply, grammar)
    finally:
        leave()


async def _grammar(served: Served, body: Body) -> GrammarConstraint | None:
    """What the answer must follow, compiled where it holds up nobody else."""
    if body.form is None:
        return None
    spelled = _spelling(served, body.form[0])
    return await asyncio.get_running_loop().run_in_executor(served.compilers, grammar_constraint, body, spelled)


def _submit(engine: Engine, asked: Generation) -> None:
    try:
        engine.submit(asked)
    except Busy as busy:
        message = f"the server is busy: {busy}; try again"
        raise ApiError(429, message, code="rate_limit_exceeded", headers=RETRY) from busy
    except PromptTooLong as error:
        raise bad_request(str(error), code="context_length_exceeded") from error


def _whole(deltas: list[Delta] | None, reply: Reply, grammar: GrammarConstraint | None) -> Response:
    if deltas is None:
        return Response(status_code=499)  # nobody reads it: the client has left
    last = deltas[-1]
    if (failure := _failure(last, grammar)) is not None:
        raise ApiError(*failure)
    assert last.usage is not None, "the last delta carries the usage"
    answer = Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )
    return JSONResponse(reply.whole(answer, last.usage), headers=reply.envelope.headers)


async def _events(deltas: Deltas, reply: Reply, grammar: GrammarConstraint | None) -> AsyncIterator[str]:
    """Server-sent events. A failure midway is an event of its own: the status line has long gone out."""
    for chunk in reply.opening():
        yield _event(chunk)
    first = True
    async for delta in deltas.read():
        if delta.text or delta.logprobs or (delta.token_ids and reply.envelope.return_token_ids):
            yield _event(reply.piece(delta, first))
            first = False
        for chunk in _ending(delta, reply, grammar):
            yield _event(chunk)
    yield "data: [DONE]\n\n"


def _ending(delta: Delta, reply: Reply, grammar: GrammarConstraint | None) -> list[dict[str, Any]]:
    """The chunks that follow the last delta; none after any other."""
    if delta.finish_reason is None:
        return []
    if (failure := _failure(delta, grammar)) is not None:
        return [error_body(*failure)]
    assert delta.usage is not None, "the last delta carries the usage"
    return reply.closing(delta.finish_reason, delta.usage)


def _failure(last: Delta, grammar: GrammarConstraint | None) -> tuple[int, str] | None:
    """The HTTP status and the message of a request that came to nothing; None where it is answered."""
    if last.finish_reason not in {"stop", "length"}:
        return 503 if last.finish_reason == "cancelled" else 500, last.error or "the request was cancelled"
    if grammar is not None and grammar.fault:
        return 400, f"the output could not be kept in its grammar: {grammar.fault}"
    return None


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone; its body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream that calls `leave` when it is over, however that came about."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None], further: Mapping[str, str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **further}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
