"""A request on its way through the engine: what was asked, what has come out, and where its memory stands."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from adapter.policy import Policy
from adapter.sampling import Constraint, Sampler
from adapter.typical import Typical
from service.engine.slots import Slots
from service.engine.text import TextStream
from storage.records import Round


@dataclass(frozen=True)
class Usage:
    """The figures of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    rounds: tuple[Round, ...]
    time_to_first_token_ms: float
    total_ms: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's log-probabilities at one output position: its own, temperature 1, before any processing."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, as many as were asked for


@dataclass(frozen=True)
class Delta:
    """What one step of the engine added to a request; the last one has a finish reason and the usage."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop, length, cancelled, error
    usage: Usage | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # aligned with token_ids; empty unless asked for


@dataclass(frozen=True)
class TeacherRow:
    """The target's top K before the token that it refused, at one output position."""

    position: int
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float16]
    tail_log_mass: float
    refusal: float = 0.0  # how likely that refusal was; 0 where it is not known, or there was none


@dataclass(eq=False)
class Generation:
    """A request in the engine. `listener` is called from the engine's thread after every step."""

    request_id: str
    prompt_ids: list[int]
    policy: Policy
    max_tokens: int
    listener: Callable[[Delta], None]
    stop: tuple[str, ...] = ()
    seed: int | None = None
    workload: str = "default"
    tenant: str = "default"
    train: bool = True
    draft_length: int | None = None  # None: the governor's choice; 0: plain decoding
    logprobs: int | None = None  # likeliest alternatives to report a token; None: no log-probabilities
    constraint: Constraint | None = None  # structured output
    typical: Typical | None = None  # LOSSY: proposals need only be typical; None: exact verification
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    audit: bool = False  # decoded for the identity audit, and for nobody else
    lane: str = ""  # the drafter that proposes for it; the engine says so when the request comes in
    output_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    teacher: list[TeacherRow] = field(default_factory=list)
    finish_reason: str | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def lossless(self) -> bool:
        return self.typical is None

    @property
    def trains(self) -> bool:
        """Whether a drafter may learn from it."""
        return self.train and self.lossless


@dataclass(eq=False)
class Row:
    """A generation that holds a slot. The slot's index is the row's place in the engine's list of rows."""

    generation: Generation
    text: TextStream
    sampler: Sampler
    sequence: list[int]  # prompt and output
    target_length: int = 0  # tokens of the sequence in the target's memory; all but the last, between rounds
    drafter_length: int = 0  # tokens of the sequence in `drafter_memory`
    drafter_gap: tuple[int, int] = (0, 0)  # from where up to where that memory was left out
    drafter_memory: Slots | None = None  # the slots of the drafter that proposed last, where it has any
    state: Tensor | None = None  # [S], what that drafter keeps of the target's hidden states, where it follows them
    resident: object = None  # that drafter

    @property
    def remaining(self) -> int:
        return self.generation.max_tokens - len(self.generation.output_ids)


def usage(generation: Generation) -> Usage:
    """The usage of a finished generation."""
    return Usage(
        prompt_tokens=len(generation.prompt_ids),
        completion_tokens=len(generation.output_ids),
        rounds=tuple(generation.rounds),
        time_to_first_token_ms=(generation.first_token_at - generation.submitted_at) * 1e3,
        total_ms=(generation.finished_at - generation.submitted_at) * 1e3,
    )


def clipped(rounds: list[Round], length: int) -> list[Round]:
    """Rounds of an output of `length` tokens, without the proposals past its end.

    A round cut short by the end of text, a stop string or max_tokens is no rejection, and counts as accepted
    only what was committed.
    """
    kept = []
    for r in rounds:
        room = length - r.start
        accepted, proposed = min(r.accepted, room), min(r.proposed, room)
        rejected = accepted < proposed
        kept.append(
            msgspec.structs.replace(
                r,
                proposed=proposed,
                accepted=accepted,
                rejected_token=r.rejected_token if rejected else -1,
                rejected_q=r.rejected_q if rejected else 0.0,
            )
        )
    return kept
