"""The serving engine as the teacher: it is asked, off-peak, what its target thinks of logged text.

For engines that show no probabilities of what they generate, or too few, where the trainer has no room for the target.
An engine scores a prompt as it reads it, so a logged request is sent as one: its tokens, and for each the likeliest
ones. The rows have the logged ones' form and meaning, and go into the window before it is stored; so purges, retention
and reproduction know them as they know all others.

Serving comes first: one request at a time, a bounded number of tokens a second, and none while the engine's own metrics
say that it is busy. What could not be asked within the patience keeps the rows that it had.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import structlog

from adapter.rescore import wanted
from storage.config import setting
from storage.records import FeedbackRecord, RecordRefused
from storage.validation import validate
from worker.engine_http import NO_PAGE, EngineAway, Http, RequestRefused, TeacherRefused, load_of
from worker.engine_scoring import Scoring, SglangScoring, VllmScoring, rows_of

LEAST_TOP_K: Final = 5
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0  # seconds between two looks at a busy engine

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True)
class EngineTeacherConfig:
    """Which engine teaches where REDRAFT_TEACHER=engine, and how much it may be asked."""

    teacher_url: str = setting(
        "", "engine that teaches: the address of a vLLM or SGLang server, e.g. http://127.0.0.1:8000"
    )
    teacher_model: str = setting("", "name of its model; empty: the first one that it lists")
    teacher_key: str = setting("", "key that it asks for; empty: none")
    teacher_tokens: float = setting(2000.0, "tokens a second that it is asked to score at most")
    teacher_busy: int = setting(0, "requests that it may have running while it is asked; none may wait there")
    teacher_patience: float = setting(
        600.0, "seconds that one window may take; what was not scored by then stays as it was"
    )

    def __post_init__(self) -> None:
        if self.teacher_tokens <= 0:
            raise ValueError(f"REDRAFT_TEACHER_TOKENS={self.teacher_tokens}: use more than 0")


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class EngineTeacher:
    """One engine. `read` is all that a trainer calls; it never raises for what the engine does."""

    def __init__(self, config: EngineTeacherConfig, top_k: int, clock: Clock = Clock()) -> None:
        self._config, self._top_k, self._clock = config, top_k, clock
        self._http = Http(config.teacher_url, config.teacher_key)

    def read(
        self, records: Sequence[FeedbackRecord], vocab_size: int, should_stop: Callable[[], None] = lambda: None
    ) -> list[FeedbackRecord]:
        """The records, in their order, with the engine's rows at every position that a drafter proposes for.

        `should_stop` is called before each of them and while the engine is busy, and ends it by raising.
        """
        turn = _Turn(self._http, self._config, self._clock, should_stop)
        try:
            asked = turn.patiently(lambda: self._capable(records))
        except TeacherRefused as refused:
            log.error("teacher.refused", url=self._config.teacher_url, reason=str(refused))
            return list(records)
        if asked is None:
            log.warning("teacher.away", url=self._config.teacher_url, unscored=len(records))
            return list(records)
        found = [self._read(asked, record, vocab_size, turn) for record in records]
        scored = sum(record is not before for record, before in zip(found, records, strict=True))
        log.info("teacher.asked", scored=scored, left_as_they_were=len(records) - scored, top_k=asked.top_k)
        return found

    def _read(self, asked: Scoring, record: FeedbackRecord, vocab_size: int, turn: "_Turn") -> FeedbackRecord:
        """The record with the engine's rows, or as it was."""
        if len(wanted(record, "verified")) == 0:
            return record
        try:
            rows = turn.take(len(record.prompt) + len(record.output), lambda: rows_of(asked, record))
            taught = record if rows is None else msgspec.structs.replace(record, teacher=rows)
            validate(taught, vocab_size)
        except (RequestRefused, RecordRefused) as refused:
            log.warning("teacher.not_scored", record=record.record_id, reason=str(refused))
            return record
        return taught

    def _capable(self, records: Sequence[FeedbackRecord]) -> Scoring:
        """What can be asked for, found out with a few tokens; raises `TeacherRefused`."""
        if not self._config.teacher_url:
            raise TeacherRefused("REDRAFT_TEACHER=engine needs REDRAFT_TEACHER_URL")
        tokens = [*records[0].prompt[:2].tolist(), *records[0].output[:2].tolist()] if records else [0, 0]
        model, reasons = self._config.teacher_model or self._first_model(), []
        for asks in (VllmScoring, SglangScoring):
            for top_k in sorted({k for k in (self._top_k, 20, LEAST_TOP_K) if k <= self._top_k}, reverse=True):
                scoring = asks(self._http, model, top_k)
                try:
                    scoring.score(tokens)
                    return scoring
                except RequestRefused as refused:
                    reasons.append(f"{scoring.name}, top {top_k}: {refused}")
        raise TeacherRefused(f"it scores no prompts ({'; '.join(reasons)}): use REDRAFT_TEACHER=rescored")

    def _first_model(self) -> str:
        try:
            return str(self._http.get_json("/v1/models")["data"][0]["id"])
        except (RequestRefused, LookupError, TypeError) as error:
            raise TeacherRefused(f"it lists no models ({error}): set REDRAFT_TEACHER_MODEL") from error


class _Turn:
    """The asking for one window: its pace, its patience, and stepping back for the engine's own requests."""

    def __init__(self, http: Http, config: EngineTeacherConfig, clock: Clock, should_stop: Callable[[], None]) -> None:
        self._http, self._config, self._clock, self._should_stop = http, config, clock, should_stop
        self._ends = clock.now() + config.teacher_patience
        self._next = clock.now()

    def take(self, tokens: int, ask: Callable[[], T]) -> T | None:
        """Ask when it is our turn; the next one's comes when these `tokens` are paid for."""
        self._rest(min(self._next, self._ends) - self._clock.now())
        began = self._clock.now()
        answer = self.patiently(ask)
        if answer is not None:
            self._next = max(began, self._next) + tokens / self._config.teacher_tokens
        return answer

    def patiently(self, ask: Callable[[], T]) -> T | None:
        """Ask while the engine is idle; again while it is busy or away. None when the patience is over."""
        wait = FIRST_WAIT
        while self._clock.now() < self._ends:
            self._should_stop()
            try:
                if not self._busy():
                    return ask()
            except EngineAway as away:
                log.info("teacher.waits", reason=str(away))
            self._rest(min(wait, self._ends - self._clock.now()))
            wait = min(2 * wait, LONGEST_WAIT)
        return None

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._clock.sleep(seconds)

    def _busy(self) -> bool:
        """By the engine's own figures; an engine without any is asked at the bounded pace alone."""
        try:
            running, waiting = load_of(self._http.get("/metrics").decode(errors="replace"))
        except (RequestRefused, *NO_PAGE):
            return False
        return waiting > 0 or running > self._config.teacher_busy
