"""What one arm did with one set of prompts, once: what every arm gives back, ours or a peer.

`progress` counts what rounds committed and how long they took: the first token of a request comes out of the
prefill, and neither it nor the prefill is in there.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class RunFailed(RuntimeError):
    """A request under measurement failed, so that its figures would mean nothing."""


@dataclass(frozen=True)
class PlayedRound:
    """One round of one request that proposed something."""

    proposed: int
    accepted: int
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    tokens: tuple[int, ...]
    latency_ms: float
    rounds: tuple[PlayedRound, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Tokens that rounds committed, over all requests, and the time of those rounds."""

    tokens: int
    ms: float
    round_ms: tuple[float, ...]  # each round of the whole batch, from end to end

    @property
    def per_ms(self) -> float:
        """Accepted progress; 0.0 where no round was played."""
        return self.tokens / self.ms if self.ms else 0.0


@dataclass(frozen=True)
class Run:
    """All requests of one arm in one repeat."""

    answers: tuple[Answer, ...]  # in the order of the prompts
    seconds: float
    progress: Progress
    peak_memory_mb: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


@dataclass(frozen=True)
class Event:
    """What happened to one request at a moment (perf_counter, seconds)."""

    at: float
    request: int
    kind: str  # sent; first: its first token, out of the prefill; round: tokens of a round
    tokens: int = 0


def progress_of(events: Sequence[Event]) -> Progress:
    """From the engine's events in order. A round gives each live request one event, so one that comes again opens
    the next round. Rounds that began while a prompt was waiting to be read are left out: that was done in between.
    """
    tokens, rounds, seen, reading = 0, list[float](), set[int](), set[int]()
    began = ended = 0.0
    counted = False
    for event in events:
        if event.kind == "sent":
            reading.add(event.request)
            continue
        if event.kind == "first":
            reading.discard(event.request)
            seen.clear()
        else:
            if not seen or event.request in seen:
                began, seen, counted = ended, set(), not reading
                rounds += [0.0] * counted
            seen.add(event.request)
            if counted:
                rounds[-1] = (event.at - began) * 1e3
                tokens += event.tokens
        ended = event.at
    return Progress(tokens, sum(rounds), tuple(rounds))
