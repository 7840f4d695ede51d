"""Reads the engine's counters every few seconds and says which version they belong to.

They carry no version, so they are read right before a swap and right after it: what came until then is the old
version's, what comes from then on the new one's, and what came meanwhile nobody's. Where no record carries rounds, the
sums go into the acceptance history.
"""

import threading
from collections.abc import Callable
from typing import Final

import structlog

from service.hosts.sidecar.counters import NO_PAGE, Growth, Reading, added, growth, parse
from service.hosts.sidecar.engine_client import AWAY, METRICS_SECONDS, EngineClient

UNKNOWN: Final = 0  # the version of what nobody can tell

log = structlog.get_logger()


class Scraper:
    """`keep(version, growth)` gets every difference that is not empty; `restarted` hears of a new engine process."""

    def __init__(
        self,
        client: EngineClient,
        seconds: float,
        version: Callable[[], int | None],
        keep: Callable[[int, Growth], None] = lambda version, growth: None,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._seconds, self._version = client, seconds, version
        self._keep, self._restarted = keep, restarted
        self._last: Reading | None = None
        self._lock = threading.RLock()
        self._totals: dict[int, Growth] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrape", daemon=True)

    @property
    def totals(self) -> dict[int, Growth]:
        """What was counted since the start, by version."""
        with self._lock:
            return dict(self._totals)

    @property
    def gauges(self) -> dict[str, float]:
        """What the engine says itself where it has no counters (SGLang)."""
        with self._lock:
            return dict(self._last.gauges) if self._last else {}

    def start(self) -> None:
        if self._seconds > 0:
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * METRICS_SECONDS)

    def look(self) -> Reading | None:
        """Read the page and count what has come since; None where it cannot be read."""
        with self._lock:
            reading = self._read()
            if reading is None:
                return None
            self._count(growth(self._last, reading))
            again = self._last is not None and reading.started_at > self._last.started_at > 0
            self._last = reading
        if again:
            log.info("sidecar.engine_restarted")
            self._restarted()
        return reading

    def forget(self) -> None:
        """Take the next reading as the first: what has come since the last one is nobody's."""
        with self._lock:
            self._last = self._read()

    def _count(self, grown: Growth) -> None:
        if grown.drafts <= 0:
            return
        version = self._version() or UNKNOWN
        self._totals[version] = added(self._totals.get(version, Growth()), grown)
        try:
            self._keep(version, grown)
        except Exception as error:  # no database: the figures of a few seconds are missing in the history
            log.warning("sidecar.not_in_history", error=type(error).__name__)

    def _read(self) -> Reading | None:
        try:
            status, page = self._client.get("/metrics", METRICS_SECONDS)
            return parse(page.decode()) if status == 200 else None
        except (*AWAY, *NO_PAGE) as error:
            log.debug("sidecar.no_metrics", error=type(error).__name__)
            return None

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self.look()
