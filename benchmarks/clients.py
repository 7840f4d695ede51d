"""Streaming clients of the HTTP server, on bare sockets: what a slow reader does to a server is done here by not
reading, which a client library with buffers of its own would hide.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

SMALL_BUFFER = 2048  # bytes that a slow reader's socket and stream hold, a few chunks
END = "[DONE]"


class BadAnswer(RuntimeError):
    """The server did not answer as it should."""


@dataclass(frozen=True)
class Sent:
    """One request's outcome; `error` is empty where it went well."""

    at: float  # when it was over
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Ask:
    """A prompt and how many tokens are wanted."""

    prompt: str
    max_tokens: int


class Client:
    """Sends one request at a time; `each` hears how many tokens came, as they come."""

    def __init__(self, url: str, model: str, each: Callable[[int], None], pause: float = 0.0) -> None:
        """A client that waits `pause` seconds before each piece of an answer is a slow reader."""
        self._host, self._model, self._each, self._pause = urlsplit(url), model, each, pause

    async def send(self, ask: Ask) -> Sent:
        """Never raises for what the server or the network did: that is an outcome."""
        tokens = 0
        try:
            async for chunk in self._chunks(ask):
                got = len(_choice(chunk).get("token_ids") or ())
                tokens += got
                self._each(got)
        except (OSError, EOFError, ValueError, BadAnswer, asyncio.IncompleteReadError) as error:
            return Sent(perf_counter(), tokens, f"{type(error).__name__}: {error}")
        return Sent(perf_counter(), tokens)

    async def _chunks(self, ask: Ask) -> AsyncIterator[dict[str, Any]]:
        """The answer's chunks; raises `BadAnswer` unless it is whole."""
        reader, writer = await self._connect()
        try:
            writer.write(self._request(ask))
            await writer.drain()
            await _check_status(reader)
            finished = False
            async for data in self._events(reader):
                if data == END:
                    if not finished:
                        raise BadAnswer("the stream ended without a finish reason")
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise BadAnswer(chunk["error"]["message"])
                finished = finished or _choice(chunk).get("finish_reason") is not None
                yield chunk
            raise BadAnswer("the connection closed before the stream's end")
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._host.hostname or "", self._host.port or 80
        if not self._pause:
            return await asyncio.open_connection(*address)
        slow = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, address)
        return await asyncio.open_connection(sock=slow, limit=SMALL_BUFFER)

    async def _events(self, reader: asyncio.StreamReader) -> AsyncIterator[str]:
        """The data of server-sent events. The server sends each event as one HTTP chunk, so lines are whole."""
        while line := await reader.readline():
            if line.startswith(b"data: "):
                if self._pause:
                    await asyncio.sleep(self._pause)
                yield line[6:].decode().strip()

    def _request(self, ask: Ask) -> bytes:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": not self._pause,  # they come with the prompt's, and a slow reader has no room for those
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: {self._host.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            "X-Redraft-Workload: soak",
            "X-Redraft-Train: no",
            "Connection: close",
        )
        return "\r\n".join((*head, "", "")).encode() + data


async def _check_status(reader: asyncio.StreamReader) -> None:
    """Read the head; raises `BadAnswer` with what the body says unless the status is 200."""
    status = (await reader.readline()).decode().split(" ", 2)
    while (await reader.readline()).strip():
        pass
    if len(status) < 2 or status[1] != "200":
        raise BadAnswer(f"HTTP {' '.join(status[1:]).strip()}: {(await reader.read(2000)).decode(errors='replace')}")


def _choice(chunk: dict[str, Any]) -> dict[str, Any]:
    choices = chunk.get("choices") or [{}]
    found: dict[str, Any] = choices[0]
    return found
