"""The measurement behind `redraft bench decode`: every arm under every setting, interleaved in one process.

A cell is a workload, a temperature and a batch size. All of its arms, of every k, take turns over the same
prompts, in an order that is turned from repeat to repeat, so that what the machine does meanwhile hits all alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target
from benchmarks.arms import Arm, Play, engine_arms
from benchmarks.figures import Counts, Measured, Row, Setting, rows_of
from benchmarks.machine import Machine, machine, still_heap
from benchmarks.meanings import MEANINGS
from benchmarks.peers import Peer
from benchmarks.probability import mean_acceptance
from benchmarks.run import Run
from benchmarks.workload import Workload
from service.engine.audit import compare
from service.engine.engine import EngineConfig
from service.engine.governor import GovernorConfig

Say = Callable[[str], None]
WARM_UP = 2  # requests of each arm before a cell is measured; at least a full batch


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured."""

    ks: tuple[int, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    requests: int
    max_tokens: int
    repeats: int
    drafter: str = ""
    version: int = 0
    random_weights: bool = False  # the drafter's shape, without what it learned


@dataclass(frozen=True)
class Report:
    """The table, and what it was measured on."""

    settings: DecodeSettings
    workloads: tuple[str, ...]
    machine: Machine
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "meanings": MEANINGS}


@dataclass(frozen=True)
class Subject:
    """The weights under measurement."""

    target: Target
    drafter: CausalLM
    peer: Peer
    engine: EngineConfig
    governor: GovernorConfig


def measure(
    target: Target,
    drafter: CausalLM,
    engine: EngineConfig,
    governor: GovernorConfig,
    workloads: Sequence[Workload],
    settings: DecodeSettings,
    say: Say = lambda line: None,
) -> Report:
    """The whole table. `engine` and `governor` give the settings besides those that are varied."""
    room = max(workload.longest for workload in workloads) + settings.max_tokens
    subject = Subject(target, drafter, Peer(target, drafter), replace(engine, context=room), governor)
    rows: list[Row] = []
    for batch in settings.batches:
        with all_arms(subject, settings.ks, batch) as arms:
            for workload in workloads:
                for temperature in settings.temperatures:
                    say(f"{workload.name}, temperature {temperature:g}, batch {batch}: {len(arms)} arms")
                    rows += _cell(subject, settings, arms, workload, temperature, batch, say)
    return Report(settings, tuple(w.name for w in workloads), machine(target), tuple(rows))


@contextmanager
def all_arms(subject: Subject, ks: Sequence[int], batch: int) -> Iterator[list[Arm]]:
    """Engines and peers of one batch size; the engines stop after the block."""
    ours = engine_arms(subject.target, subject.engine, subject.governor, subject.drafter, ks, batch)
    try:
        with still_heap():
            yield [*ours, *subject.peer.arms(ks, batch)]
    finally:
        for arm in ours:
            arm.close()


def _cell(
    subject: Subject,
    settings: DecodeSettings,
    arms: Sequence[Arm],
    workload: Workload,
    temperature: float,
    batch: int,
    say: Say,
) -> list[Row]:
    play = Play(workload.name, workload.prompts, Policy(temperature=temperature), settings.max_tokens)
    runs = interleave(arms, play, settings.repeats, max(WARM_UP, batch), say)
    plain = runs[0][0].answers
    texts = [(prompt, answer.tokens) for prompt, answer in zip(play.prompts, plain, strict=True)]
    judge = Judge(subject.target, play, texts)
    cell = [Measured(arm.name, arm.k, made, judge.counts(made)) for arm, made in zip(arms, runs, strict=True)]
    probability = mean_acceptance(subject.target, subject.drafter, play.policy, texts)
    setting = Setting(workload.name, temperature, batch, len(play.prompts), probability)
    return rows_of(setting, cell, settings.ks)


def interleave(arms: Sequence[Arm], play: Play, repeats: int, warm_up: int, say: Say) -> list[tuple[Run, ...]]:
    """Every arm's runs, in the order of the arms, after `warm_up` requests of each."""
    runs: list[list[Run]] = [[] for _ in arms]
    for arm in arms:
        arm.run(replace(play, prompts=play.prompts[:warm_up]))
    for repeat in range(repeats):
        turn = repeat * -(-len(arms) // repeats)
        for i in ((turn + j) % len(arms) for j in range(len(arms))):
            runs[i].append(arms[i].run(play))
        say(f"  repeat {repeat + 1} of {repeats}")
    return [tuple(made) for made in runs]


class Judge:
    """Holds greedy outputs against plain decoding's; each different pair of them costs one target pass."""

    def __init__(self, target: Target, play: Play, plain: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self._target, self._greedy, self._plain = target, play.policy.greedy, plain
        self._known: dict[tuple[int, tuple[int, ...]], str] = {}

    def counts(self, runs: Sequence[Run]) -> Counts | None:
        """Over all repeats; None where tokens are drawn."""
        if not self._greedy:
            return None
        verdicts = [self._verdict(i, answer.tokens) for run in runs for i, answer in enumerate(run.answers)]
        return Counts(*(verdicts.count(name) for name in ("identical", "near_tie", "different")))

    def _verdict(self, i: int, tokens: tuple[int, ...]) -> str:
        if (i, tokens) not in self._known:
            prompt, plain = self._plain[i]
            self._known[i, tokens] = compare(self._target, list(prompt), list(plain), list(tokens)).verdict
        return self._known[i, tokens]
