"""What feedback costs: the same engine with the whole way to Redis behind it, and with nothing, in turn.

On: teacher rows at rejections, a record of each request, its writing. The time of a run ends when Redis has
confirmed its last record, so that nothing is put off into the other arm's time; a client would wait less.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target
from benchmarks.arms import EngineArm, Play
from benchmarks.machine import Machine, machine, still_heap
from benchmarks.run import RunFailed
from benchmarks.workload import Workload
from service.engine.engine import EngineConfig
from service.engine.generation import Generation
from service.feedback import FeedbackWriter
from service.origin import Origin
from service.recording import record_of

NAME = "bench"  # of the stream that is written to
WRITE_SECONDS = 30.0


@dataclass(frozen=True)
class FeedbackSettings:
    batches: tuple[int, ...]
    requests: int
    max_tokens: int
    repeats: int
    draft_length: int


@dataclass(frozen=True)
class FeedbackRow:
    """Tokens per second at one batch size; a ratio below 1: feedback costs something.

    Runs with and without take turns: of each pair of neighbours the machine's slow hours hit both.
    """

    batch: int
    on: tuple[float, ...]
    off: tuple[float, ...]
    tokens_per_second_on: float
    tokens_per_second_off: float
    ratio: float  # of the medians
    paired_ratio: float  # median of the ratios of neighbours


@dataclass(frozen=True)
class FeedbackReport:
    settings: FeedbackSettings
    machine: Machine
    rows: tuple[FeedbackRow, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    target: Target,
    drafter: CausalLM,
    engine: EngineConfig,
    workload: Workload,
    settings: FeedbackSettings,
    redis_url: str,
    say: Callable[[str], None] = lambda line: None,
) -> FeedbackReport:
    """On against off at each batch size."""
    config = replace(engine, context=workload.longest + settings.max_tokens, audit_share=0.0)
    config = replace(config, draft_length=settings.draft_length)
    play = Play(workload.name, workload.prompts, Policy(temperature=0.0), settings.max_tokens)
    rows = []
    for batch in settings.batches:
        say(f"feedback on against off, batch {batch}: {settings.repeats} runs each, in turn")
        measured = replace(config, slots=batch, waiting=batch)
        rows.append(_row(target, drafter, measured, play, settings.repeats, redis_url))
    return FeedbackReport(settings, machine(target), tuple(rows))


class Recording:
    """The way of a finished request into Redis, which can be switched off."""

    def __init__(self, target: Target, url: str) -> None:
        files = target.files
        self._origin = Origin(files.fingerprint, files.tokenizer_fingerprint, NAME)
        self._writer = FeedbackWriter(url, NAME)
        self._put = 0
        self.on = False

    def finished(self, generation: Generation) -> None:
        if self.on:
            self._writer.put(record_of(generation, self._origin))
            self._put += 1

    def wait(self) -> None:
        """Until all is written; raises `RunFailed` where it is not."""
        deadline = perf_counter() + WRITE_SECONDS
        while self._writer.written < self._put:
            if perf_counter() > deadline or self._writer.dropped:
                raise RunFailed(f"feedback was not written: {self._writer.dropped or 'Redis does not answer'}")
            sleep(0.0005)

    def close(self) -> None:
        self._writer.close()


def _row(
    target: Target, drafter: CausalLM, config: EngineConfig, play: Play, repeats: int, redis_url: str
) -> FeedbackRow:
    recording = Recording(target, redis_url)
    arm = EngineArm("feedback", target, config, drafter, on_finished=recording.finished)
    try:
        with still_heap():
            _pair(arm, recording, play, on_first=True)  # warm-up
            pairs = [_pair(arm, recording, play, on_first=repeat % 2 == 0) for repeat in range(repeats)]
    finally:
        arm.close()
        recording.close()
    with_it, without = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    speed_on, speed_off = median(with_it), median(without)
    paired = median(on / off for on, off in pairs)
    return FeedbackRow(config.slots, with_it, without, speed_on, speed_off, speed_on / speed_off, paired)


def _pair(arm: EngineArm, recording: Recording, play: Play, on_first: bool) -> tuple[float, float]:
    """Tokens per second with feedback and without; which comes first changes from repeat to repeat."""
    order: Sequence[bool] = (True, False) if on_first else (False, True)
    found = {on: _speed(arm, recording, play, on) for on in order}
    return found[True], found[False]


def _speed(arm: EngineArm, recording: Recording, play: Play, on: bool) -> float:
    recording.on = arm.train = on
    began = perf_counter()
    run = arm.run(play)
    recording.wait()
    return sum(len(answer.tokens) for answer in run.answers) / (perf_counter() - began)
