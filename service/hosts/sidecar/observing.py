"""Which requests are observed, and what becomes of their answers. Between the proxy, which it may never hold up or
fail, and the feedback writer.

Reading an answer takes a while where it has log-probabilities: that is done by a thread, from a bounded queue.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final
from uuid import uuid4

import structlog

from service.hosts.sidecar import asking
from service.hosts.sidecar.asking import Asked
from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.dialects import CHAT, COMPLETIONS
from service.hosts.sidecar.findings import Findings
from service.hosts.sidecar.headers import Headers, sender_of, value_of
from service.hosts.sidecar.reading import Seen, read
from service.hosts.sidecar.recording import Answered, Sender, Unusable
from service.hosts.sidecar.stripping import Stripping
from service.hosts.sidecar.turns import Turns

REFUSALS: Final = 3  # in a row, after which the engine is asked again what it takes

log = structlog.get_logger()


@dataclass(frozen=True)
class Observed:
    """A request on its way, and what the engine is asked in its place."""

    record_id: str
    sender: Sender
    asked: Asked
    body: bytes
    stripping: Stripping
    version: int | None  # of the drafter when it began
    moves: int  # beginnings and ends of swaps until then


@dataclass(frozen=True)
class Ended:
    """An observed request whose last byte has gone out."""

    answered: Answered
    texts: tuple[bytes, ...]  # JSON: the whole answer, or a stream's chunks
    dialect_engine: str


class Observer:
    """`served` tells the version that proposes now, and a number that is odd during a swap and higher after it.

    `keep` gets what was read.
    """

    def __init__(
        self,
        config: SidecarConfig,
        findings: Callable[[], Findings | None],
        served: Callable[[], tuple[int | None, int]],
        keep: Callable[[Ended, Seen], None],
        ask_again: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._findings, self._served, self._keep = findings, served, keep
        self._ask_again, self._turns = ask_again, Turns(config.sidecar_share)
        self._queue: SimpleQueue[Ended | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refused = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="observe", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Observed requests by what became of them."""
        with self._lock:
            return dict(self._counts)

    def count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def wants(self, method: str, path: str, headers: Headers, others: int = 0) -> Sender | None:
        """Whose request it is, where it is one to be observed; `others` are at the engine already."""
        if method != "POST" or path not in (CHAT, COMPLETIONS) or not self._turns.takes(others + 1):
            return None
        findings = self._findings()
        if findings is None or not any(form.path == path for form in findings.plans):
            return None
        length = value_of(headers, b"content-length")
        plain = length.isdigit() and int(length) <= self.config.sidecar_body_limit
        return sender_of(headers) if plain and not value_of(headers, b"content-encoding") else None

    def prepared(self, path: str, sender: Sender, body: bytes) -> Observed | None:
        """What is asked of the engine instead; None where the request is left as it is."""
        try:
            found = self._prepared(path, sender, body)
        except Exception as error:  # a fault here is no reason to fail a request
            log.warning("sidecar.not_observed", error=type(error).__name__)
            self.count("fault")
            return None
        self.count("observed" if found else "not_plain")
        return found

    def _prepared(self, path: str, sender: Sender, body: bytes) -> Observed | None:
        findings = self._findings()
        asked = asking.read(path, body, findings.model) if findings else None
        plan = findings.plans.get(asked.form) if findings and asked else None
        if findings is None or asked is None or plan is None:
            return None
        new = asking.asking(body, asked, findings.dialect, plan.top_k)
        if new is None:
            return None
        stripping = Stripping(asked.wants, plan.bare, findings.dialect)
        return Observed(uuid4().hex, sender, asked, new, stripping, *self._served())

    def refused(self) -> None:
        """The engine would not take the additions, and took what the client had written."""
        self.count("refused")
        self._refused += 1
        if self._refused >= REFUSALS:
            log.warning("sidecar.refused", times=self._refused, then="the engine is asked again what it takes")
            self._refused = 0
            self._ask_again()

    def ended(self, observed: Observed, texts: Sequence[bytes], began: float, first: float, ended: float) -> None:
        """Take the answer to be read; never waits, never raises."""
        self._refused = 0
        if self._queue.qsize() >= self.config.sidecar_queue:
            self.count("queue_full")
            return
        version, moves = self._served()
        steady = version if moves == observed.moves and moves % 2 == 0 else None
        answered = Answered(observed.record_id, observed.sender, observed.asked, began, first, ended, steady)
        self._queue.put(Ended(answered, tuple(texts), observed.stripping.dialect.engine))

    def close(self, timeout: float = 5.0) -> None:
        """Read what waits, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            self._read(ended)

    def _read(self, ended: Ended) -> None:
        try:
            self._keep(ended, read(ended.texts))
        except Unusable as reason:
            self.count(str(reason))
        except Exception as error:  # an answer of another shape: the thread outlives it
            log.warning("sidecar.unreadable", error=type(error).__name__)
            self.count("unreadable")
        else:
            self.count("recorded")
