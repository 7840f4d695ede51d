"""The measurement behind `redraft bench sidecar`: an engine's throughput with a sidecar before it and without one.

The same prompts are sent to the engine itself and through the sidecars in turn, pass by pass, each time in another
order, so that what else the machine does weighs on all of them. Every request streams, and produces as many tokens.
"""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from time import perf_counter

DIRECT = "direct"
TIMEOUT = 600.0  # seconds


class BadAnswer(RuntimeError):
    """An engine or a sidecar did not answer as it should."""


@dataclass(frozen=True)
class SidecarSettings:
    model: str
    prompts: tuple[str, ...]
    max_tokens: int
    batch: int  # requests in flight
    repeats: int


@dataclass(frozen=True)
class ArmSpeed:
    """One way to the engine."""

    arm: str
    tokens_per_second: tuple[float, ...]  # a pass each, in their order
    first_token_ms: float  # median of all requests

    @property
    def median(self) -> float:
        return median(self.tokens_per_second)


@dataclass(frozen=True)
class SidecarReport:
    batch: int
    arms: tuple[ArmSpeed, ...]

    def overhead(self, arm: str) -> float:
        """The share of the direct throughput that is lost, by the medians of the passes."""
        speeds = {each.arm: each.median for each in self.arms}
        return 1 - speeds[arm] / speeds[DIRECT]


def measure(
    settings: SidecarSettings, urls: Mapping[str, str], progress: Callable[[str], None] = lambda line: None
) -> SidecarReport:
    """`urls` by arm, `DIRECT` among them. One more pass of each arm comes first, and does not count."""
    speeds: dict[str, list[float]] = {arm: [] for arm in urls}
    first: dict[str, list[float]] = {arm: [] for arm in urls}
    for number in range(settings.repeats + 1):
        for arm in _rotated(list(urls), number):
            seconds, waits = _pass(urls[arm], settings)
            if number:
                speeds[arm].append(len(settings.prompts) * settings.max_tokens / seconds)
                first[arm] += waits
                progress(f"pass {number} of {settings.repeats}, {arm}: {speeds[arm][-1]:.1f} tokens/s")
    return SidecarReport(
        settings.batch, tuple(ArmSpeed(arm, tuple(speeds[arm]), median(first[arm]) * 1e3) for arm in urls)
    )


def _rotated(arms: Sequence[str], by: int) -> list[str]:
    at = by % len(arms)
    return [*arms[at:], *arms[:at]]


def _pass(url: str, settings: SidecarSettings) -> tuple[float, list[float]]:
    """Seconds until all prompts were answered, and each one's wait for its first piece."""
    began = perf_counter()
    try:
        with ThreadPoolExecutor(settings.batch) as clients:
            waits = list(clients.map(lambda prompt: _ask(url, settings, prompt), settings.prompts))
    except (OSError, http.client.HTTPException, BadAnswer) as error:
        raise BadAnswer(f"{url}: {error}") from error
    return perf_counter() - began, waits


def _ask(url: str, settings: SidecarSettings, prompt: str) -> float:
    """One streamed completion of exactly `max_tokens`; how long its first piece took."""
    body = {
        "model": settings.model, "prompt": prompt, "max_tokens": settings.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(url.partition("://")[2].rstrip("/"), timeout=TIMEOUT)
    try:
        began = perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        piece = answer.read1()
        first = perf_counter() - began
        if answer.status != 200:
            raise BadAnswer(f"HTTP {answer.status}: {piece[:200]!r}")
        last = piece
        while piece := answer.read1():
            last = last[-64:] + piece
        if b"[DONE]" not in last:
            raise BadAnswer("a stream broke off")
        return first
    finally:
        connection.close()
