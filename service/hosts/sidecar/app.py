"""The reverse proxy itself, as an ASGI application: any request to the engine and its answer back, as the bytes come.

A request that is not observed is passed through in pieces, in both directions, each piece as soon as it is there and
none before the other side takes it. Of an observed one the body is read first, and the answer goes through `stripping`.
A client that leaves ends its request at the engine; an engine that dies midway breaks the client's connection off, as
it would have by itself.
"""

import asyncio
import json
import posixpath
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

import httpcore2
import structlog

from service.hosts.sidecar.excision import NotPlain
from service.hosts.sidecar.headers import Headers, end_to_end, to_engine, value_of, without
from service.hosts.sidecar.observing import Observed, Observer
from service.hosts.sidecar.stripping import Stream
from service.hosts.sidecar.upstream import UNREACHABLE, Upstream, host_of, path_of

LONGEST_ANSWER: Final = 32 * 1024 * 1024  # bytes that are kept of an observed answer; longer ones are not read
REFUSED: Final = frozenset({400, 422, 500, 501})  # statuses that the additions may be the cause of
OWN: Final = "/redraft"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Own = Callable[[str], tuple[int, bytes, bytes]]  # path below /redraft to status, media type and body

log = structlog.get_logger()


class ClientLeft(Exception):
    """The client has closed its connection before its request was whole."""


class Sidecar:
    """`own` answers under /redraft; `passes` says whether a path of the engine is for clients."""

    def __init__(
        self, upstream: Upstream, observer: Observer, own: Own, passes: Callable[[str], bool] = lambda path: True
    ) -> None:
        self._upstream, self._observer, self._own, self._passes = upstream, observer, own, passes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1011})  # before it is accepted: HTTP 403
        else:
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = posixpath.normpath("/" + scope["path"].lstrip("/"))
        if path == OWN or path.startswith(f"{OWN}/"):
            status, media, body = await asyncio.to_thread(self._own, path.removeprefix(OWN))
            await _reply(send, status, body, media)
        elif not self._passes(path):
            await _refuse(
                send, 403, f"{path} steers the engine: the sidecar passes it on to nobody; ask the engine itself"
            )
        else:
            await self._pass(scope, Incoming(receive), send)

    async def _pass(self, scope: Scope, incoming: "Incoming", send: Send) -> None:
        """The exchange, for as long as the client stays."""
        exchange = asyncio.ensure_future(Exchange(self._upstream, self._observer, scope, incoming, send).run())
        leaving = asyncio.ensure_future(incoming.left())
        try:
            await asyncio.wait({exchange, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not exchange.done():
                exchange.cancel()
        with suppress(asyncio.CancelledError, ClientLeft):
            await exchange


class Incoming:
    """The client's side: its body, and then whether it is still there."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        """In the pieces that came; raises `ClientLeft`."""
        more = not self._read.is_set()
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            more = message.get("more_body", False)
            if not more:
                self._read.set()
            if data := message.get("body", b""):
                yield data

    def skip(self) -> None:
        """A request without a body ends with its headers: from now on the client can only leave."""
        self._read.set()

    async def left(self) -> None:
        """Returns when the client has gone; not before its body was read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Exchange:
    """One request and its answer."""

    def __init__(self, upstream: Upstream, observer: Observer, scope: Scope, incoming: Incoming, send: Send) -> None:
        self._upstream, self._observer, self._scope = upstream, observer, scope
        self._incoming, self._send = incoming, send
        self._url = upstream.url  # the same for all of this exchange
        self._headers = to_engine(scope, host_of(self._url))
        self._started = False
        self._began = time.monotonic()

    async def run(self) -> None:
        try:
            await self._exchange()
        except UNREACHABLE as error:
            if self._started:
                # Without an end the server breaks the connection off, and the client sees that there is more missing.
                log.warning("sidecar.engine_broke_off", error=type(error).__name__)
                return
            log.warning("sidecar.engine_unreachable", error=type(error).__name__)
            timed_out = isinstance(error, httpcore2.TimeoutException)
            await _refuse(self._send, 504 if timed_out else 502, "the engine behind this sidecar cannot be reached")

    async def _exchange(self) -> None:
        others = self._upstream.busy(self._url)
        sender = self._observer.wants(self._scope["method"], self._scope["path"], self._scope["headers"], others)
        if sender is None:
            await self._plainly(self._incoming.body() if _has_body(self._scope["headers"]) else None)
            return
        body = b"".join([piece async for piece in self._incoming.body()])
        observed = self._observer.prepared(self._scope["path"], sender, body)
        refusal = await self._observed(observed) if observed else None
        if observed is None or refusal is not None:
            status = await self._plainly(body)
            if refusal not in (None, status):
                self._observer.refused()

    async def _plainly(self, body: AsyncIterator[bytes] | bytes | None) -> int:
        """As the client wrote it, and back as the engine wrote it; the status."""
        headers = self._headers
        if body is None:
            self._incoming.skip()
        elif not value_of(headers, b"content-length"):
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        async with self._ask(headers, body) as response:
            await self._relay(response)
            status: int = response.status
            return status

    async def _observed(self, observed: Observed) -> int | None:
        """Ask for more and take it out again; the status where the engine would not have it."""
        headers = without(self._headers, b"content-length", b"accept-encoding", b"transfer-encoding")
        headers += [(b"content-length", str(len(observed.body)).encode()), (b"accept-encoding", b"identity")]
        async with self._ask(headers, observed.body) as response:
            status: int = response.status
            if status in REFUSED:
                return status
            media = value_of(response.headers, b"content-type").partition(b";")[0].strip().lower()
            if status != 200 or value_of(response.headers, b"content-encoding"):
                await self._relay(response)
            elif media == b"text/event-stream":
                await self._stream(observed, response)
            elif media == b"application/json":
                await self._whole(observed, response)
            else:
                await self._relay(response)
        return None

    async def _relay(self, response: httpcore2.Response) -> None:
        await self._start(response.status, end_to_end(response.headers))
        async for piece in response.aiter_stream():
            await self._piece(piece)
        await self._end()

    async def _stream(self, observed: Observed, response: httpcore2.Response) -> None:
        """Each event without the additions as soon as it is whole."""
        await self._start(response.status, without(end_to_end(response.headers), b"content-length"))
        stream, first = Stream(observed.stripping, LONGEST_ANSWER), 0.0
        async for data in response.aiter_stream():
            if piece := stream.feed(data):
                await self._piece(piece)
                first = first or time.monotonic()
        if rest := stream.rest():
            await self._piece(rest)
        await self._end()
        self._note(observed, stream.chunks if stream.whole else [], first, stream.faults)

    async def _whole(self, observed: Observed, response: httpcore2.Response) -> None:
        body = b"".join([data async for data in response.aiter_stream()])
        first, faults = time.monotonic(), 0
        try:
            stripped = observed.stripping.text(body)
        except NotPlain:
            stripped, faults = body, 1
        headers = end_to_end(response.headers)
        if value_of(headers, b"content-length"):
            headers = [(k, str(len(stripped)).encode() if k.lower() == b"content-length" else v) for k, v in headers]
        await self._start(response.status, headers)
        await self._piece(stripped)
        await self._end()
        self._note(observed, [body] if len(body) <= LONGEST_ANSWER else [], first, faults)

    def _note(self, observed: Observed, texts: list[bytes], first: float, faults: int) -> None:
        for _ in range(faults):
            self._observer.count("not_stripped")
        if texts:
            self._observer.ended(observed, texts, self._began, first or self._began, time.monotonic())
        else:
            self._observer.count("too_long")

    def _ask(self, headers: Headers, body: AsyncIterator[bytes] | bytes | None) -> Any:
        raw: bytes = self._scope.get("raw_path") or self._scope["path"].encode()
        query: bytes = self._scope.get("query_string") or b""
        target = path_of(self._url).encode() + raw + (b"?" + query if query else b"")
        return self._upstream.ask(self._scope["method"], target, headers, body, self._url)

    async def _start(self, status: int, headers: Headers) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_body(headers: Headers) -> bool:
    length = value_of(headers, b"content-length")
    return bool(value_of(headers, b"transfer-encoding")) or (length not in (b"", b"0"))


async def _refuse(send: Send, status: int, message: str) -> None:
    """In OpenAI's form, so that its clients can read it."""
    kind = "permission_error" if status == 403 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    await _reply(send, status, json.dumps(body).encode(), b"application/json")


async def _reply(send: Send, status: int, body: bytes, media: bytes) -> None:
    headers = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
