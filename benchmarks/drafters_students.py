"""The students of `redraft bench drafters`: a drafter of each kind, taught by the same records, and what that took.

They learn in fp32, as in the worker, and are measured as a server loads them. An `ngram` drafter has nothing to learn:
it is given the records' outputs to look in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from adapter.acceptance import Acceptance
from adapter.distil import DistilConfig, Lesson, distil
from adapter.drafters.kinds import KINDS
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.ngram import Ngram
from adapter.drafters.protocol import Drafter, DraftRow, Shape
from adapter.drafters.recent import Recent
from adapter.drafters.shared import Shared
from adapter.policy import Policy
from adapter.replay import matches_by_depth, rounds
from adapter.rescore import hidden_states
from adapter.sampling import Sampler
from adapter.target import Target
from benchmarks.machine import peak_memory
from service.engine.warming import warm_up
from storage.records import FeedbackRecord

NGRAM = Ngram.kind
GREEDY = Policy(temperature=0.0)


@dataclass(frozen=True)
class Training:
    """What teaching took."""

    records: int
    reading_seconds: float  # in which the target read the records again, for a kind that needs hidden states
    seconds: float  # in which the student learned
    peak_memory_mb: float  # of the process, meanwhile

    @property
    def seconds_per_thousand(self) -> float:
        """For a thousand records, reading again included."""
        return 1000 * (self.reading_seconds + self.seconds) / max(self.records, 1)


@dataclass(frozen=True)
class Student:
    """A drafter as a server has it, and version 1 of its kind likewise."""

    kind: str
    drafter: Drafter
    first: LearntDrafter | None  # None: a kind that does not learn
    training: Training
    memory_mb: float  # of its weights, or of what it looks in
    position_bytes: int  # of its own keys and values, for each token of a request

    @property
    def parameters(self) -> int:
        """Its own weights, without what it shares with the target."""
        own = self.drafter.own_tensors().values()
        return sum(tensor.numel() for tensor in own if tensor.is_floating_point())


@dataclass(frozen=True)
class Replayed:
    """What a drafter does on answers that it has not seen, without the engine."""

    probability: float  # acceptance probability: the first token of a proposal, over all positions
    length: float | None  # acceptance length of chains; None where only the engine tells


def taught(
    make: Callable[[], LearntDrafter],
    target: Target,
    shared: Shared,
    records: Sequence[FeedbackRecord],
    config: DistilConfig,
    shape: Shape,
) -> Student:
    """A student of the kind whose version 1 `make` gives; it is to propose up to that shape.

    `shared` is what a server's drafters have of the target.
    """
    first = make()
    with peak_memory() as peak:
        began = perf_counter()
        hidden = hidden_states(target, records, first.taps, config.max_context)
        read = perf_counter()
        student = distil(first, Lesson(records, hidden=hidden), config).student
        ended = perf_counter()
    ours = served(student, shared)
    return Student(
        first.kind,
        ours,
        served(first, shared),
        Training(len(records), read - began if first.taps else 0.0, ended - read, peak[0]),
        sum(tensor.numel() * tensor.element_size() for tensor in ours.own_tensors().values()) / 1e6,
        warm_up(ours, target, shape),
    )


def looking_up(target: Target, records: Sequence[FeedbackRecord], tokens: int) -> Student:
    """N-grams over the records' outputs, of which the last `tokens` are kept."""
    recent = Recent(tokens, target.vocab_size)
    with peak_memory() as peak:
        began = perf_counter()
        for record in records:
            recent.insert(record.workload, record.output.tolist())
        seconds = perf_counter() - began
    training = Training(len(records), 0.0, seconds, peak[0])
    return Student(NGRAM, Ngram(target.vocab_size, target.device, recent), None, training, recent.bytes / 1e6, 0)


def served(drafter: LearntDrafter, shared: Shared) -> LearntDrafter:
    """The same drafter as a server loads it, in the target's dtype and place."""
    tensors = drafter.own_tensors()
    made = KINDS[drafter.kind].rebuilt(drafter.config.to_dict(), shared, tensors)
    made.load_own(tensors)
    return made


def replayed(drafter: Drafter, target: Target, answers: Sequence[FeedbackRecord], k: int) -> Replayed:
    """Over all answers of more than one token: their first is never proposed."""
    answers = [answer for answer in answers if len(answer.output) > 1]
    if isinstance(drafter, Ngram):
        return Replayed(_share([_guessed(drafter, answer) for answer in answers]), None)
    assert isinstance(drafter, LearntDrafter), "what does not look up has learned"
    hidden = hidden_states(target, answers, drafter.taps)  # of whole texts, so that replay is what serving does
    matched = [matches_by_depth(drafter, answer, k, hidden.get(answer.record_id)) for answer in answers]
    played = [played for found in matched for played in rounds(found, k)]
    return Replayed(_share([found[0, 1:] for found in matched]), Acceptance.of(played).length)


def _guessed(drafter: Ngram, answer: FeedbackRecord) -> npt.NDArray[np.bool_]:
    """At each output position but the first, whether what the text before makes it propose is what came."""
    prompt, output = answer.prompt.tolist(), answer.output.tolist()
    row = DraftRow(prompt, 0, 1, Sampler(GREEDY, prompt, []), workload=answer.workload)
    guesses = (drafter.found(replace(row, pending=prompt + output[:at]), 1) for at in range(1, len(output)))
    return np.array(
        [bool(found) and found[0].tokens[0] == came for found, came in zip(guesses, output[1:], strict=True)]
    )


def _share(found: Sequence[npt.NDArray[np.bool_]]) -> float:
    return float(np.concatenate(found).mean()) if found else 0.0
