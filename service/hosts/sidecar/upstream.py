"""The engine behind the sidecar: connections to it, and to which of two new requests go while they are exchanged.

httpcore is httpx' own transport. It is used bare here because it leaves targets and headers as they are written, and
adds none.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import httpcore2

from service.hosts.sidecar.headers import Headers

CONNECT_SECONDS: Final = 10.0
_TIMEOUTS: Final = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
UNREACHABLE: Final = (
    httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, httpcore2.UnsupportedProtocol
)  # fmt: skip


class WrongUrl(ValueError):
    """An engine's address that cannot be used; the message says what one looks like."""


class Upstream:
    """Where requests go. `flip` may be called from any thread; the rest is the event loop's."""

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._in_flight: Counter[str] = Counter()
        self._url = _checked(url)
        # A connection that is kept may be closed by the engine just when it is used again (llama.cpp does after each
        # stream), and a request that is lost so must not be sent twice. A new one costs next to nothing on one machine.
        self._pool = httpcore2.AsyncConnectionPool(max_connections=None, max_keepalive_connections=0)

    @property
    def url(self) -> str:
        """Where new requests go."""
        return self._url

    def flip(self, url: str) -> None:
        """New requests go there from now on; those that run stay where they are."""
        self._url = _checked(url)

    def busy(self, url: str) -> int:
        """How many requests that engine still answers."""
        with self._lock:
            return self._in_flight[_checked(url)]

    @asynccontextmanager
    async def ask(
        self, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | bytes | None, url: str
    ) -> AsyncIterator[httpcore2.Response]:
        """One request and its answer, which is over with the block; raises one of `UNREACHABLE`."""
        place = urlsplit(url)
        address = httpcore2.URL(
            scheme=place.scheme.encode(), host=(place.hostname or "").encode(), port=place.port, target=target
        )
        request = httpcore2.Request(method, address, headers=headers, content=body, extensions={"timeout": _TIMEOUTS})
        self._count(url, 1)
        try:
            response = await self._pool.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self._count(url, -1)

    async def close(self) -> None:
        await self._pool.aclose()

    def _count(self, url: str, by: int) -> None:
        with self._lock:
            self._in_flight[url] += by


def host_of(url: str) -> bytes:
    """The Host header of requests to there."""
    return urlsplit(url).netloc.rpartition("@")[2].encode()


def path_of(url: str) -> str:
    """What stands before every path there."""
    return urlsplit(url).path.rstrip("/")


def _checked(url: str) -> str:
    """Without the slash at its end; `http://HOST:8000/v1` is how clients know an engine, and means the engine."""
    place = urlsplit(url if "://" in url else f"http://{url}")
    if place.scheme not in ("http", "https") or not place.hostname or place.query or place.fragment or place.username:
        raise WrongUrl(f"{url!r} is no engine's address: give one such as http://127.0.0.1:8000")
    return f"{place.scheme}://{place.netloc}{place.path.rstrip('/').removesuffix('/v1')}"
