"""A request's deltas on their way from the engine's thread to the coroutine that answers the client."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from service.engine.generation import Delta


class Deltas:
    """What the engine says about one request, in order, up to and including the last delta.

    Make it in the coroutine that reads it; pass `put` as the generation's listener. The queue holds no more
    than one request's output.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self.finished = False

    def put(self, delta: Delta) -> None:
        """Called from the engine's thread, which never waits for a client."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)

    async def read(self) -> AsyncIterator[Delta]:
        """Each delta as it comes."""
        while not self.finished:
            delta = await self._queue.get()
            self.finished = delta.finish_reason is not None
            yield delta

    async def read_all(self, gone: Coroutine[Any, Any, None]) -> list[Delta] | None:
        """Every delta, at the end; None where `gone` returns first: nobody waits for the answer then."""
        reading, leaving = asyncio.create_task(self._all()), asyncio.create_task(gone)
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            leaving.cancel()

    async def _all(self) -> list[Delta]:
        return [delta async for delta in self.read()]
