"""A sidecar before some engine, both on loopback sockets, and an engine that says just what a test wants."""

import asyncio
import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.hosts.sidecar.app import Own, Sidecar
from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.engine_client import EngineClient
from service.hosts.sidecar.findings import Findings
from service.hosts.sidecar.observing import Ended, Observer
from service.hosts.sidecar.probe import probe
from service.hosts.sidecar.reading import Seen
from service.hosts.sidecar.upstream import Upstream
from tests.service.serving import running
from tests.waiting import until

Asgi = Callable[[Any, Any, Any], Any]
IDENTITY = re.compile(rb'"id":"[^"]*"|"created":\d+')  # what differs from one answer to the next


def served(app: Asgi) -> AbstractContextManager[str]:
    """The application on a free port, without headers of uvicorn's own."""
    return running(
        app,
        log_level="critical",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ws="none",
    )


def told(address: str, path: str, body: Any, seconds: float = 60) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, as they are on the wire but for the identity of the answer."""
    connection = http.client.HTTPConnection(address.partition("://")[2], timeout=seconds)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    data, headers = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    headers.pop("date", None)
    return answer.status, headers, IDENTITY.sub(b"-", data)


async def body_of(receive: Any) -> bytes:
    """A request's, in an ASGI application."""
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


@dataclass
class Rig:
    address: str
    upstream: Upstream
    observer: Observer
    findings: Findings | None
    kept: list[tuple[Ended, Seen]] = field(default_factory=list)
    asked_again: list[bool] = field(default_factory=list)

    def read(self, answers: int) -> list[tuple[Ended, Seen]]:
        """What was observed, once that many answers were read."""
        until(lambda: len(self.kept) >= answers)
        return self.kept


def _nothing_own(path: str) -> tuple[int, bytes, bytes]:
    return 404, b"text/plain", path.encode()


@contextmanager
def beside(
    engine: str,
    share: float = 1.0,
    findings: Findings | None = None,
    own: Own = _nothing_own,
    passes: Callable[[str], bool] = lambda path: True,
    keep: Callable[[Ended, Seen], None] | None = None,
) -> Iterator[Rig]:
    """A sidecar before the engine, which it asks what it is unless a test knows."""
    config = SidecarConfig(sidecar_share=share)
    if findings is None and share > 0:
        client = EngineClient(lambda: engine)
        findings = probe(client, config)
        client.close()
    kept: list[tuple[Ended, Seen]] = []
    asked_again: list[bool] = []
    upstream = Upstream(engine)
    observer = Observer(
        config,
        lambda: findings,
        lambda: (3, 0),
        keep or (lambda ended, seen: kept.append((ended, seen))),
        lambda: asked_again.append(True),
    )
    with served(Sidecar(upstream, observer, own, passes)) as address:
        yield Rig(address, upstream, observer, findings, kept, asked_again)
    observer.close()


RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "vllm_cpu_0.32.0.json").read_text())
"""Answers of a real vLLM by form, plain and observed; see test_recorded."""


async def recorded_vllm(scope: Any, receive: Any, send: Any) -> None:
    """An engine that gives the recorded answers, whatever it is asked."""
    if scope["type"] != "http":
        return
    body = await body_of(receive)
    fields = json.loads(body or b"{}")
    stream, kind = bool(fields.get("stream")), "observed" if fields.get("return_token_ids") else "plain"
    found = RECORDED.get(f"{scope['path']} {stream}", {}).get(kind, "{}").encode()
    if scope["path"] == "/v1/models":
        found = b'{"data":[{"id":"smollm2","owned_by":"vllm"}]}'
    media = b"text/event-stream" if stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", media)]})
    await send({"type": "http.response.body", "body": found})


@dataclass
class Script:
    """An engine that answers as it is told, and remembers what it was asked."""

    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"content-type", b"application/json")])
    pieces: list[bytes] = field(default_factory=lambda: [b"{}"])
    pause: float = 0.0  # seconds before each piece but the first
    dies_after: int | None = None  # pieces, and then the connection breaks off
    refuses: str = ""  # a field that it does not take: HTTP 400
    asked: list[dict[str, Any]] = field(default_factory=list)  # method, path, query, headers, body
    begun: int = 0  # pieces that it set out to send
    sent: int = 0
    left: int = 0  # clients that went before the end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await body_of(receive)
        self.asked.append(
            {
                "method": scope["method"],
                "target": scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b""),
                "headers": scope["headers"],
                "body": body,
            }
        )
        if self.refuses and self.refuses.encode() in body:
            await self._send_refusal(send)
            return
        gone = asyncio.ensure_future(self._gone(receive))
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for number, piece in enumerate(self.pieces):
            if number == self.dies_after:
                gone.cancel()
                return  # without an end: uvicorn breaks the connection off
            if number and self.pause:
                await asyncio.sleep(self.pause)
            if gone.done():
                self.left += 1
                return
            self.begun += 1
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.sent += 1
        gone.cancel()
        if self.dies_after is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _send_refusal(self, send: Any) -> None:
        body = json.dumps({"error": {"message": f"{self.refuses} is not known"}}).encode()
        await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
