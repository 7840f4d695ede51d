"""The reference serving engine: a thread that reads prompts into slots and plays rounds until they finish.

Requests join and leave between rounds, and so do drafters: a round sees one drafter version a request. A long
prompt is read a piece at a time between the rounds of the others. A fault of a drafter never reaches a request:
the engine goes on without it, and says so.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import structlog
import torch

from adapter.drafters.protocol import Drafter
from adapter.target import Target
from service.engine import attention
from service.engine.accept import Outcome
from service.engine.audit import Audit
from service.engine.batch import Batch
from service.engine.commit import commit, note
from service.engine.floor import FloorConfig
from service.engine.generation import Delta, Generation, Row, clipped, usage
from service.engine.governor import Governor, GovernorConfig
from service.engine.inbox import Inbox
from service.engine.lanes import Lanes
from service.engine.memory import KvMemory, position_bytes
from service.engine.ngrams import Fallback, Ngrams
from service.engine.prompts import Prompts
from service.engine.residents import DEFAULT, Residents
from service.engine.rounds import first_token
from service.engine.shapes import Shapes
from service.engine.slots import Slots
from service.engine.speculation import Speculation
from service.engine.teaching import Teaching
from storage.config import setting

NOTHING_NEW = Delta("", ())

log = structlog.get_logger()


class PromptTooLong(ValueError):
    """A request does not fit in the engine's context."""


@dataclass(frozen=True)
class EngineConfig:
    """How the reference engine decodes."""

    draft_length: int = setting(4, "k: tokens proposed a round at most; 0 for plain decoding")
    tree_nodes: int = setting(
        0,
        "tokens of the largest tree that may be proposed a round, as deep as the draft length; 0: chains only. 15 fill "
        "what a CPU with AMX multiplies at once",
    )
    tree_kept: int = setting(
        0,
        "of a tree's tokens, how many go through the target's last layers where the drafter has an early exit before "
        "them (streaming); the least likely are dropped there. 0: all",
    )
    fallback: Fallback = setting("none", "what proposes where no drafter is live: `ngram`, or `none`: plain decoding")
    ngram_first: bool = setting(
        False,
        "let the governor try what followed the same tokens before, up to 15 tokens of it, before the drafter's own "
        "or in one tree with it",
    )
    ngram_tokens: int = setting(
        262_144, "tokens of recent outputs that n-grams are looked for in, 24 bytes each; 0: in the request alone"
    )
    slots: int = setting(16, "requests decoded together")
    context: int = setting(2048, "tokens of prompt and output a request may have, if the target allows as many")
    waiting: int = setting(256, "requests that may wait for a slot; further ones get HTTP 429")
    prefill_chunk: int = setting(256, "prompt tokens read between two rounds")
    kv_memory: float = setting(4.0, "GiB that keys and values may take; what needs more is refused at the start")
    teacher_top_k: int = setting(64, "target probabilities kept at a rejection position")
    audit_share: float = setting(0.01, "share of greedy requests that are decoded again plainly and compared")

    @property
    def uses_ngrams(self) -> bool:
        """Whether anything is made of n-grams."""
        return self.ngram_first or self.fallback == "ngram"


class Engine:
    """Decodes for many clients at once. `on_finished` is called from the engine's thread and must not block."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        on_finished: Callable[[Generation], None],
        governor: GovernorConfig = GovernorConfig(),
        floor: FloorConfig = FloorConfig(),
        ngrams: Ngrams | None = None,
    ) -> None:
        """`ngrams` are looked up where the settings say so; None: in the outputs of this engine itself.

        Raises `MemoryBound` where the slots do not fit, and `NotServed` for a target without plain attention.
        """
        self._target, self._config, self._on_finished = target, config, on_finished
        self.context = min(config.context, target.context)
        self._shapes = Shapes.of(config.draft_length, config.tree_nodes, config.ngram_first, config.tree_kept)
        capacity = self.context + self._shapes.places + 2  # padding of a batch may stand past a row's end
        attention.install(target.model)
        memory = KvMemory(config.kv_memory, config.slots, capacity)
        memory.take("target", "target", position_bytes(target.model.get_decoder()))
        self._slots = Slots(target.model.get_decoder(), config.slots, capacity)
        self._residents = Residents(floor)
        self._batch = Batch(config.slots, self._move)
        self._inbox = Inbox(config.waiting)
        largest = self._shapes.shape(self._shapes.largest)
        self.lanes = Lanes(target, self._residents, memory, self._inbox, largest)
        self._prompts = Prompts(
            target,
            self._slots,
            self._batch,
            self._inbox,
            config.prefill_chunk,
            self._residents.of,
            lambda failed: self._speculation.without([failed.resident]),
        )
        governed = governor.governor and config.draft_length > 0
        self.governor = Governor(self._shapes, governor) if governed else None
        lookups = None
        if config.uses_ngrams:
            lookups = ngrams or Ngrams.of(target.vocab_size, torch.device(target.device), config.ngram_tokens)
        self._speculation = Speculation(
            target, self._slots, self._residents, self._shapes, self.governor, lookups, config.fallback
        )
        self._teaching = Teaching(config.teacher_top_k)
        self.audit = Audit(target, config.audit_share, self._inbox.submit_audit)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Stop between rounds; what was running or waiting ends with the finish reason `cancelled`."""
        self._inbox.stop()
        self._thread.join(timeout)
        self._speculation.stop()

    @property
    def draft_length(self) -> int:
        return self._config.draft_length

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, generation: Generation) -> None:
        """Queue a request; raises `Busy` or `PromptTooLong`."""
        prompt, most = len(generation.prompt_ids), generation.max_tokens
        if prompt == 0 or most < 1 or prompt + most > self.context:
            raise PromptTooLong(
                f"{prompt} prompt tokens and max_tokens {most} do not fit in the context of {self.context} tokens"
            )
        generation.lane = self._residents.admit(generation.workload)
        self._inbox.submit(generation)

    def cancel(self, request_id: str) -> None:
        """Free a request's slot before the next round."""
        self._inbox.cancel(request_id)

    def swap(
        self,
        version: int,
        drafter: Drafter | None,
        holdback: float = 0.0,
        guarded: bool = False,
        lane: str = DEFAULT,
    ) -> "Future[int]":
        """Replace a lane's drafter before the next round; the future gives the version once it is in.

        That share of the lane's requests stays on the drafter that was live. A guarded one is new: where its first
        rounds are below the floor, the engine goes back by itself. What costs time is done here, in the caller's
        thread. Another lane than the default one is made by its first drafter, and goes with `None`. Raises
        `MemoryBound` where the drafter's keys and values do not fit.
        """
        return self.lanes.swap(version, drafter, holdback, guarded, lane)

    def lanes_in_use(self) -> set[str]:
        """The lanes that routes lead to, or that requests which have not finished are on."""
        rows = [*self._batch.rows, self._batch.filling]
        return {*self.lanes.routed(), *(row.generation.lane for row in rows if row is not None)}

    def _run(self) -> None:
        with torch.inference_mode():
            while self._inbox.wait(busy=len(self._batch) > 0):
                try:
                    self._step()
                except Exception:
                    log.exception("engine.step_failed", rows=len(self._batch))
                    self._abandon("error", "the engine failed on this request; see the server's log")
        self._abandon("cancelled", "the server is stopping")

    def _step(self) -> None:
        self._swap_in()
        self._drop_cancelled()
        self._read_prompts()
        if self._batch.rows:
            self._round()

    def _swap_in(self) -> None:
        if self.lanes.take_in(self._inbox.take_swaps()):
            self._speculation.swapped()

    def _drop_cancelled(self) -> None:
        ids, waiting = self._inbox.take_cancelled()
        for generation in waiting:
            self._finish(generation, "cancelled")
        for row in [r for r in self._batch.all if r.generation.request_id in ids]:
            self._leave(row, NOTHING_NEW, "cancelled")

    def _read_prompts(self) -> None:
        for prompt in self._prompts.read():
            outcome = first_token(self._target, prompt.row, prompt.logits)
            prompt.tell(outcome.tokens[0])
            self._commit(prompt.row, outcome)

    def _round(self) -> None:
        turn = self._speculation.play(list(self._batch.rows))
        if turn is None:
            return
        result = turn.result
        for row, outcome, resident in zip(turn.rows, result.outcomes, result.proposers, strict=True):
            note(row, outcome, result, resident.version, self._teaching)
            self._commit(row, outcome)
        self._speculation.learn(turn)

    def _commit(self, row: Row, outcome: Outcome) -> None:
        delta = commit(row, outcome.tokens, outcome.logprobs, self._target.eos_ids)
        reason = row.generation.finish_reason
        if reason:
            self._leave(row, delta, reason)
        else:
            self._tell(row.generation, delta)

    def _leave(self, row: Row, last: Delta, reason: str) -> None:
        self._batch.leave(row)
        self._finish(row.generation, reason, last)

    def _move(self, source: int, destination: int) -> None:
        self._slots.move(source, destination)
        self._residents.move(source, destination)

    def _finish(self, generation: Generation, reason: str, last: Delta = NOTHING_NEW, error: str = "") -> None:
        generation.finish_reason = reason
        generation.finished_at = perf_counter()
        generation.rounds = clipped(generation.rounds, len(generation.output_ids))
        self._teaching.cut()
        generation.teacher = [t for t in generation.teacher if t.position < len(generation.output_ids)]
        if not generation.audit:
            self._speculation.finished(generation)
            self._on_finished(generation)
            self.audit.consider(generation)
        self._tell(generation, Delta(last.text, last.token_ids, reason, usage(generation), error, last.logprobs))

    def _abandon(self, reason: str, error: str) -> None:
        for generation in [row.generation for row in self._batch.clear()] + self._inbox.take_all():
            self._finish(generation, reason, error=error)

    def _tell(self, generation: Generation, delta: Delta) -> None:
        try:
            generation.listener(delta)
        except Exception:
            log.exception("engine.listener_failed", request_id=generation.request_id)
