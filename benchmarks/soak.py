"""The measurement behind `redraft bench soak`: many streaming clients for a while, one of them a slow reader.

Time is cut into windows. The slow reader reads in every second one, so that the others' speed with it and without
it is measured under the same conditions. Memory must not rise from window to window, and no slot may stay taken.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter, sleep
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.clients import Ask, Client, Sent

WINDOWS = 6  # the first pair is warm-up
PAUSE = 0.25  # seconds that the slow reader waits before each piece
SAMPLE_SECONDS = 0.5
SETTLE_SECONDS = 20.0
GROWTH_MB = 24.0  # that resident memory may grow by in the measured time, or this share of it
GROWTH_SHARE = 0.03
JUDGED_SECONDS = 20.0  # measured time below which memory is shown and not judged: caches are still filling


@dataclass(frozen=True)
class SoakSettings:
    url: str
    clients: int
    seconds: float
    max_tokens: int


@dataclass(frozen=True)
class Memory:
    """Resident memory of the server, in MB; the slope is a straight line through the time after warm-up."""

    start: float
    after_warm_up: float
    end: float
    slope_per_minute: float
    grown: float  # by that line, in the measured time
    seconds: float  # of that time
    samples: tuple[tuple[float, float], ...]  # (second, MB)

    @property
    def grows(self) -> bool:
        return self.seconds >= JUDGED_SECONDS and self.grown > max(GROWTH_MB, GROWTH_SHARE * self.after_warm_up)


@dataclass(frozen=True)
class SoakReport:
    """What was seen. `shortfalls` says what should not have happened; empty is success."""

    settings: SoakSettings
    requests: int
    failed: int
    errors: tuple[str, ...]  # the first few
    stuck_slots: int
    memory: Memory | None  # None where the server is not ours to look into
    tokens_per_second_without_slow: float  # of the fast clients
    tokens_per_second_with_slow: float
    slow_requests: int
    shortfalls: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Tally:
    """What the fast clients got so far, and the outcome of every request."""

    tokens: int = 0
    sent: list[Sent] = field(default_factory=list)
    slow: list[Sent] = field(default_factory=list)
    speeds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    resident: list[tuple[float, float]] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self.tokens += tokens


def soak(
    settings: SoakSettings, prompts: Sequence[str], resident_mb: Callable[[], float] | None, say: Callable[[str], None]
) -> SoakReport:
    """Run the clients; `resident_mb` tells the server's memory, where it is ours."""
    model = _get(settings.url, "/v1/models")["data"][0]["id"]
    tally = Tally()
    asyncio.run(_play(settings, model, prompts, tally, resident_mb, say))
    stuck = stuck_slots(settings.url)
    return _report(settings, tally, stuck, memory_of(tally.resident) if resident_mb else None)


async def _play(
    settings: SoakSettings,
    model: str,
    prompts: Sequence[str],
    tally: Tally,
    resident_mb: Callable[[], float] | None,
    say: Callable[[str], None],
) -> None:
    """All clients until the time is over; requests in flight then are waited for."""
    over = asyncio.Event()
    asks = [_asks(prompts, settings.max_tokens, seed) for seed in range(settings.clients)]
    fast = [
        asyncio.create_task(_repeat(Client(settings.url, model, tally.add), ask, tally.sent, over)) for ask in asks[1:]
    ]
    sampling = asyncio.create_task(_sample(tally, resident_mb, over))
    reading = asyncio.Event()  # set while the slow reader is to read
    slow = asyncio.create_task(
        _read_slowly(Client(settings.url, model, lambda tokens: None, PAUSE), asks[0], tally.slow, reading, over)
    )
    for window in range(WINDOWS):
        with_slow = window % 2 == 1
        reading.set() if with_slow else reading.clear()
        speed = await _window(settings.seconds / WINDOWS, tally)
        if window > 1:
            tally.speeds[with_slow].append(speed)
        say(f"{speed:.0f} tokens/s {'with' if with_slow else 'without'} the slow reader, {len(tally.sent)} requests")
    over.set()
    reading.set()
    await asyncio.gather(*fast, sampling, slow)


async def _window(seconds: float, tally: Tally) -> float:
    """Tokens per second of the fast clients in the next `seconds`."""
    began, before = perf_counter(), tally.tokens
    await asyncio.sleep(seconds)
    return (tally.tokens - before) / (perf_counter() - began)


async def _repeat(client: Client, asks: Callable[[], Ask], sent: list[Sent], over: asyncio.Event) -> None:
    while not over.is_set():
        sent.append(await client.send(asks()))
        if sent[-1].error:
            await asyncio.sleep(PAUSE)  # a server that refuses everything is not to be hammered


async def _read_slowly(
    client: Client, asks: Callable[[], Ask], sent: list[Sent], reading: asyncio.Event, over: asyncio.Event
) -> None:
    """A request begun in a window with the slow reader may reach into the next one: it is cut there, as if the
    client had left, so that the window is clean.
    """
    while not over.is_set():
        await reading.wait()
        if over.is_set():
            return
        asking = asyncio.create_task(client.send(asks()))
        while not asking.done() and reading.is_set() and not over.is_set():
            await asyncio.wait({asking}, timeout=0.1)
        if asking.done():
            sent.append(asking.result())
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _sample(tally: Tally, resident_mb: Callable[[], float] | None, over: asyncio.Event) -> None:
    began = perf_counter()
    while resident_mb is not None and not over.is_set():
        tally.resident.append((perf_counter() - began, resident_mb()))
        await asyncio.sleep(SAMPLE_SECONDS)


def _asks(prompts: Sequence[str], max_tokens: int, seed: int) -> Callable[[], Ask]:
    """A client's requests: any prompt, any length."""
    chance = random.Random(seed)
    return lambda: Ask(chance.choice(prompts), chance.randint(max(max_tokens // 4, 1), max_tokens))


def _get(url: str, path: str) -> dict[str, Any]:
    with urlopen(f"{url}{path}", timeout=30) as response:
        found: dict[str, Any] = json.load(response)
        return found


def stuck_slots(url: str) -> int:
    """Slots and queue places that are still taken when everyone has left, after a while."""
    deadline = perf_counter() + SETTLE_SECONDS
    while True:
        health = _get(url, "/health")
        taken = int(health["running"]) + int(health["waiting"])
        if taken == 0 or perf_counter() > deadline:
            return taken
        sleep(0.1)


def memory_of(samples: Sequence[tuple[float, float]]) -> Memory:
    """The first third is warm-up: slots grow to the longest request, and allocators fill their pools."""
    warm = [sample for sample in samples if sample[0] >= samples[-1][0] / 3]
    times, sizes = np.array(warm).T
    slope = float(np.polyfit(times, sizes, 1)[0]) if len(warm) > 2 else 0.0
    return Memory(
        start=samples[0][1],
        after_warm_up=float(sizes[0]),
        end=float(sizes[-1]),
        slope_per_minute=slope * 60,
        grown=slope * float(times[-1] - times[0]),
        seconds=float(times[-1] - times[0]),
        samples=tuple((round(at, 1), round(size, 1)) for at, size in samples),
    )


def _report(settings: SoakSettings, tally: Tally, stuck: int, memory: Memory | None) -> SoakReport:
    failures = [sent.error for sent in (*tally.sent, *tally.slow) if sent.error]
    without, with_slow = (float(np.mean(tally.speeds[slow])) for slow in (False, True))
    return SoakReport(
        settings=settings,
        requests=len(tally.sent) + len(tally.slow),
        failed=len(failures),
        errors=tuple(dict.fromkeys(failures))[:5],
        stuck_slots=stuck,
        memory=memory,
        tokens_per_second_without_slow=without,
        tokens_per_second_with_slow=with_slow,
        slow_requests=len(tally.slow),
        shortfalls=tuple(_shortfalls(tally, failures, stuck, memory)),
    )


def _shortfalls(tally: Tally, failures: Sequence[str], stuck: int, memory: Memory | None) -> list[str]:
    found = []
    if failures:
        found.append(f"{len(failures)} requests failed; the first: {failures[0]}")
    if not tally.sent:
        found.append("no request was finished")
    if stuck:
        found.append(f"{stuck} slots or places are still taken after {SETTLE_SECONDS:.0f} s")
    if memory is not None and memory.grows:
        found.append(f"memory grew by {memory.grown:.0f} MB after warm-up ({memory.slope_per_minute:.1f} MB a minute)")
    return found
