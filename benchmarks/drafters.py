"""The measurement behind `redraft bench drafters`: every kind of drafter, taught by the same records.

The target's own answers to a workload are what there is to learn from. A student of each kind learns them, from that
kind's version 1, and then proposes for prompts that nobody has seen: as chains, as trees and under the governor, all of
them in turn with plain decoding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from adapter.distil import DistilConfig, TrainingFailed
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.ngram import Ngram
from adapter.drafters.protocol import Shape
from adapter.drafters.shared import Shared
from adapter.policy import Policy
from adapter.target import Target
from benchmarks.answers import Segment
from benchmarks.arms import EngineArm, Play
from benchmarks.decode import WARM_UP, Judge, interleave
from benchmarks.drafters_rows import (
    CHAIN,
    COMBINED,
    FREE,
    GOVERNED,
    TREE,
    Asked,
    Best,
    DrafterRow,
    PlainRow,
    best_of,
    drafter_row,
    meanings,
    plain_row,
)
from benchmarks.drafters_students import NGRAM, Student, looking_up, replayed, taught
from benchmarks.experiment import Say, Traffic
from benchmarks.figures import Measured
from benchmarks.machine import Machine, machine, still_heap
from service.engine.engine import EngineConfig
from service.engine.governor import GovernorConfig
from service.engine.ngrams import Ngrams
from service.engine.shapes import Shapes
from storage.records import FeedbackRecord

Starts = Mapping[str, Callable[[], LearntDrafter]]  # version 1 of each kind that learns


class NothingMeasured(RuntimeError):
    """No kind could be measured."""


@dataclass(frozen=True)
class DraftersSettings:
    """What is measured."""

    traffic: Traffic  # its requests are learned from, its held-out ones are the unseen prompts
    decoded: int  # of the unseen prompts; all are replayed
    kinds: tuple[str, ...]
    draft_length: int
    nodes: int  # of the largest tree; 0: no trees
    batch: int
    repeats: int
    together: bool  # one student of a kind for all workloads
    warm_start: bool

    @property
    def shapes(self) -> tuple[str, ...]:
        """In which a kind is measured; with long n-gram matches before it where those are measured too."""
        combined = (COMBINED,) if NGRAM in self.kinds else ()
        return (CHAIN, *((TREE,) if self.nodes else ()), GOVERNED, *combined)


@dataclass(frozen=True)
class Subject:
    """The target, and the settings besides those that are varied."""

    target: Target
    engine: EngineConfig
    governor: GovernorConfig
    distil: DistilConfig


@dataclass(frozen=True)
class Refused:
    """A kind that is not in the table, and why."""

    kind: str
    workload: str  # empty: of all
    reason: str


@dataclass(frozen=True)
class DraftersReport:
    settings: DraftersSettings
    workloads: tuple[str, ...]
    learning: DistilConfig
    machine: Machine
    rows: tuple[DrafterRow, ...]
    plain: tuple[PlainRow, ...]
    best: tuple[Best, ...]
    refused: tuple[Refused, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "meanings": meanings()}


def measure(
    subject: Subject,
    segments: Sequence[Segment],
    starts: Starts,
    settings: DraftersSettings,
    say: Say = lambda line: None,
) -> DraftersReport:
    """The whole table. Raises `NothingMeasured` where no kind could be."""
    school = _School(subject, starts, settings, say)
    everything = [record for part in segments for record in part.stream]
    students = school.students("", everything) if settings.together else []
    rows: list[DrafterRow] = []
    plain: list[PlainRow] = []
    began = perf_counter()
    for done, part in enumerate(segments, 1):
        here = students if settings.together else school.students(part.workload, part.stream)
        if here:
            first, found = _workload(subject, settings, part, here, say)
            plain.append(first)
            rows += found
        left = (perf_counter() - began) * (len(segments) / done - 1) / 60
        say(f"{part.workload} is done" + (f"; about {left:.0f} min left" if done < len(segments) else ""))
    if not rows:
        raise NothingMeasured(
            f"no kind could be measured: {'; '.join(f'{r.kind}: {r.reason}' for r in school.refused)}"
        )
    return DraftersReport(
        settings,
        tuple(part.workload for part in segments),
        subject.distil,
        machine(subject.target),
        tuple(rows),
        tuple(plain),
        tuple(best_of(rows)),
        tuple(school.refused),
    )


class _School:
    """Makes the students; what cannot be made or taught is left out, and why is kept."""

    def __init__(self, subject: Subject, starts: Starts, settings: DraftersSettings, say: Say) -> None:
        self._subject, self._starts, self._settings, self._say = subject, starts, settings, say
        self._shared = Shared(subject.target.embedding, subject.target.files)
        self.refused: list[Refused] = []

    def students(self, workload: str, records: Sequence[FeedbackRecord]) -> list[Student]:
        """One of each kind."""
        found = (self._student(kind, workload, records) for kind in self._settings.kinds)
        return [student for student in found if student is not None]

    def _student(self, kind: str, workload: str, records: Sequence[FeedbackRecord]) -> Student | None:
        target, title = self._subject.target, workload or "all workloads"
        if kind == NGRAM:
            return looking_up(target, records, self._subject.engine.ngram_tokens)
        try:
            shape = _largest(self._settings)
            made = taught(self._starts[kind], target, self._shared, records, self._subject.distil, shape)
        except (DrafterRefused, TrainingFailed) as error:
            self.refused.append(Refused(kind, workload, str(error)))
            self._say(f"{title}: {kind} is left out: {error}")
            return None
        took = made.training.seconds + made.training.reading_seconds
        self._say(f"{title}: {kind} learned from {len(records)} records in {took:.0f} s")
        return made


def _workload(
    subject: Subject, settings: DraftersSettings, part: Segment, students: Sequence[Student], say: Say
) -> tuple[PlainRow, list[DrafterRow]]:
    """All students on one workload's unseen prompts."""
    asked = [each for student in students for each in _asked(subject.target, settings, part, student)]
    unseen, count = part.held_out, settings.decoded
    prompts = tuple(tuple(unseen[i * len(unseen) // count].prompt.tolist()) for i in range(count))
    play = Play(part.workload, prompts, Policy(temperature=0.0), settings.traffic.max_tokens)
    with _arms(subject, settings, play, asked) as arms:
        say(f"{part.workload}: {len(arms)} arms on {len(prompts)} unseen prompts")
        runs = interleave(arms, play, settings.repeats, max(WARM_UP, settings.batch), say)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, runs[0][0].answers, strict=True)]
    judge = Judge(subject.target, play, texts)
    plain, *others = [Measured(arm.name, arm.k, made, judge.counts(made)) for arm, made in zip(arms, runs, strict=True)]
    rows = [
        drafter_row(part.workload, settings.batch, each, measured, plain)
        for each, measured in zip(asked, others, strict=True)
    ]
    return plain_row(part.workload, plain), rows


def _asked(target: Target, settings: DraftersSettings, part: Segment, student: Student) -> list[Asked]:
    """The student in every shape, and what replay says of it."""
    k = settings.draft_length
    after = replayed(student.drafter, target, part.held_out, k)
    before = None if student.first is None else replayed(student.first, target, part.held_out, k)
    largest = max(k, settings.nodes)
    nodes = {CHAIN: k, TREE: settings.nodes, GOVERNED: largest, COMBINED: largest}
    return [Asked(student, shape, k, nodes[shape], after, before) for shape in settings.shapes]


@contextmanager
def _arms(
    subject: Subject, settings: DraftersSettings, play: Play, asked: Sequence[Asked]
) -> Iterator[list[EngineArm]]:
    """Plain decoding and one engine for each that is asked; they stop after the block."""
    config = replace(
        subject.engine,
        slots=settings.batch,
        waiting=settings.batch,
        context=max(map(len, play.prompts)) + play.max_tokens,
        audit_share=0.0,  # an audit would decode in between
        fallback="none",
    )
    arms = [EngineArm("plain", subject.target, replace(config, draft_length=0, tree_nodes=0))]
    ngrams = next((each.student.drafter for each in asked if isinstance(each.student.drafter, Ngram)), None)
    try:
        for each in asked:
            arms.append(_arm(subject, config, each, ngrams))
        with still_heap():
            yield arms
    finally:
        for arm in arms:
            arm.close()


def _arm(subject: Subject, config: EngineConfig, asked: Asked, ngrams: Ngram | None) -> EngineArm:
    """A kind is measured by itself, and with what the ngram student has to look in where that is asked for."""
    nodes = 0 if asked.nodes == asked.k else asked.nodes
    combined, governed = asked.shape == COMBINED, asked.shape in FREE
    with_k = replace(config, draft_length=asked.k, tree_nodes=nodes, ngram_first=combined)
    name, governor = "governed" if governed else "speculative", replace(subject.governor, governor=governed)
    beside = Ngrams(ngrams, None) if combined and ngrams is not None else None
    return EngineArm(name, subject.target, with_k, asked.student.drafter, governor, ngrams=beside)


def _largest(settings: DraftersSettings) -> Shape:
    """The largest proposal that a student is asked for."""
    shapes = Shapes.of(settings.draft_length, settings.nodes)
    return shapes.shape(shapes.largest)
