"""redraft's own arms: one engine each, asked by as many clients as its batch is large.

The clients are a closed loop: each sends its next prompt from the engine's own thread the moment that its last
one is answered, so that the batch stays full and nothing is measured but the engine.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Protocol

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import Drafter
from adapter.policy import Policy
from adapter.target import Target
from benchmarks.machine import peak_memory
from benchmarks.run import Answer, Event, PlayedRound, Run, RunFailed, progress_of
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Delta, Generation
from service.engine.governor import GovernorConfig
from service.engine.ngrams import Ngrams

SWAP_SECONDS = 60.0
ORDERLY = ("stop", "length")
_ids = count()


@dataclass(frozen=True)
class Play:
    """What a run is asked to decode."""

    workload: str
    prompts: tuple[tuple[int, ...], ...]
    policy: Policy
    max_tokens: int


class Arm(Protocol):
    """A way to decode. `k` is None where the arm has no draft length."""

    name: str
    k: int | None

    def run(self, play: Play) -> Run: ...

    def close(self) -> None: ...


class EngineArm:
    """An engine of `batch` slots; plain without a drafter."""

    def __init__(
        self,
        name: str,
        target: Target,
        config: EngineConfig,
        drafter: Drafter | None = None,
        governor: GovernorConfig = GovernorConfig(governor=False),
        train: bool = False,
        on_finished: Callable[[Generation], None] = lambda generation: None,
        ngrams: Ngrams | None = None,
    ) -> None:
        """`train` says whether requests leave teacher rows behind, as they do in service.

        `ngrams` are what the settings `fallback` and `ngram_first` look in, instead of the arm's own outputs.
        """
        self.name, self.k = name, config.draft_length if drafter is not None else None
        self.train = train
        self._batch = config.slots
        self._engine = Engine(target, config, on_finished, governor, ngrams=ngrams)
        self._engine.start()
        if drafter is not None:
            self._engine.swap(1, drafter).result(SWAP_SECONDS)

    def run(self, play: Play) -> Run:
        clients = _Clients(self._engine, play, self._batch, self.train)
        with peak_memory() as peak:
            began = perf_counter()
            clients.run()
            seconds = perf_counter() - began
        if self._engine.lanes.faults:
            raise RunFailed(f"the drafter of arm {self.name} failed, and the engine went on without it: see the log")
        answers = tuple(map(_answer, clients.generations))
        return Run(answers, seconds, progress_of(clients.events), peak[0])

    def close(self) -> None:
        self._engine.stop()


class _Clients:
    """So many clients, and the requests that they send in turn."""

    def __init__(self, engine: Engine, play: Play, clients: int, train: bool) -> None:
        self._engine, self._play, self._clients, self._train = engine, play, clients, train
        self.generations: list[Generation] = []
        self.events: list[Event] = []
        self._running = 0
        self._over = threading.Event()
        self._failure = ""

    def run(self) -> None:
        """All prompts; raises `RunFailed`."""
        first = [self._next(i) for i in range(min(self._clients, len(self._play.prompts)))]
        self._running = len(first)
        self.events += [Event(perf_counter(), i, "sent") for i in range(len(first))]
        for generation in first:
            self._engine.submit(generation)
        self._over.wait()
        if self._failure:
            raise RunFailed(f"a request of {self._play.workload} failed: {self._failure}")

    def _next(self, i: int) -> Generation:
        generation = Generation(
            request_id=f"bench-{next(_ids)}",
            prompt_ids=list(self._play.prompts[i]),
            policy=self._play.policy,
            max_tokens=self._play.max_tokens,
            listener=lambda delta: self._listen(i, delta),
            workload=self._play.workload,
            train=self._train,
        )
        self.generations.append(generation)
        return generation

    def _listen(self, i: int, delta: Delta) -> None:
        """On the engine's thread."""
        kind = "first" if len(self.generations[i].output_ids) == len(delta.token_ids) else "round"
        self.events.append(Event(perf_counter(), i, kind, len(delta.token_ids)))
        if delta.finish_reason is None:
            return
        if delta.finish_reason not in ORDERLY:
            self._failure = delta.error or delta.finish_reason
        try:
            self._ended()
        except Exception as error:  # it must not be lost in the engine's log, while the main thread waits
            self._failure = str(error)
            self._over.set()

    def _ended(self) -> None:
        if len(self.generations) < len(self._play.prompts) and not self._failure:
            self.events.append(Event(perf_counter(), len(self.generations), "sent"))
            self._engine.submit(self._next(len(self.generations)))
            return
        self._running -= 1
        if self._running == 0:
            self._over.set()


def _answer(generation: Generation) -> Answer:
    rounds = tuple(PlayedRound(r.proposed, r.accepted, r.draft_ms, r.verify_ms) for r in generation.rounds)
    ms = (generation.finished_at - generation.submitted_at) * 1e3
    return Answer(tuple(generation.output_ids), ms, rounds)


def engine_arms(
    target: Target, base: EngineConfig, governor: GovernorConfig, drafter: CausalLM, ks: Sequence[int], batch: int
) -> list[Arm]:
    """Plain decoding, and for each k speculation with the governor off and on."""
    config = replace(base, slots=batch, waiting=batch, audit_share=0.0)  # an audit would decode in between
    arms: list[Arm] = [EngineArm("plain", target, replace(config, draft_length=0))]
    for k in ks:
        with_k = replace(config, draft_length=k)
        arms.append(EngineArm("speculative", target, with_k, drafter))
        arms.append(EngineArm("governed", target, with_k, drafter, replace(governor, governor=True)))
    return arms
