"""The reference serving engine: a thread that admits requests into slots and plays rounds until they finish.

Requests join and leave between rounds, and so do drafters: a round sees one drafter version. A fault of the
drafter never reaches a request: the engine goes on without it, and says so.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import structlog
import torch

from adapter.acceptance import distribution, draw
from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from service.engine import attention
from service.engine.accept import Outcome
from service.engine.generation import Delta, Generation, Row, clipped, usage
from service.engine.inbox import Inbox
from service.engine.rounds import Live, RoundResult, play, prefill
from service.engine.slots import Slots
from service.engine.text import TextStream
from storage.config import setting
from storage.records import Round

log = structlog.get_logger()


class PromptTooLong(ValueError):
    """A request does not fit in the engine's context."""


@dataclass(frozen=True)
class EngineConfig:
    """How the reference engine decodes."""

    draft_length: int = setting(4, "k: tokens proposed a round at most; 0 for plain decoding")
    slots: int = setting(16, "requests decoded together")
    context: int = setting(2048, "tokens of prompt and output a request may have, if the target allows as many")
    waiting: int = setting(256, "requests that may wait for a slot; further ones get HTTP 429")
    prefill_chunk: int = setting(512, "prompt tokens in one forward")
    teacher_top_k: int = setting(64, "target probabilities kept at a rejection position")


class Engine:
    """Decodes for many clients at once. `on_finished` is called from the engine's thread and must not block."""

    def __init__(self, target: Target, config: EngineConfig, on_finished: Callable[[Generation], None]) -> None:
        self._target, self._config, self._on_finished = target, config, on_finished
        self.context = min(config.context, target.context)
        self._capacity = self.context + config.draft_length + 2  # padding of a batch may stand past a row's end
        attention.install(target.model)
        layers = target.model.config.get_text_config().num_hidden_layers
        self._slots = Slots(layers, config.slots, self._capacity, target.device)
        self._live = Live(0)
        self._rows: list[Row] = []
        self._inbox = Inbox(config.waiting)
        self.drafter_faults = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Stop between rounds; what was running or waiting ends with the finish reason `cancelled`."""
        self._inbox.stop()
        self._thread.join(timeout)

    @property
    def live_version(self) -> int:
        """The version that proposes; 0 where there is none."""
        return self._live.version if self._live.drafter is not None else 0

    @property
    def draft_length(self) -> int:
        return self._config.draft_length

    @property
    def running(self) -> int:
        return len(self._rows)

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
        self._inbox.submit(generation)

    def cancel(self, request_id: str) -> None:
        """Free a request's slot before the next round."""
        self._inbox.cancel(request_id)

    def swap(self, version: int, drafter: CausalLM | None) -> "Future[int]":
        """Replace the drafter before the next round; the future gives the version once it is in."""
        return self._inbox.swap(version, drafter)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._inbox.wait(busy=bool(self._rows)):
                try:
                    self._step()
                except Exception:
                    log.exception("engine.step_failed", rows=len(self._rows))
                    self._abandon("error", "the engine failed on this request; see the server's log")
        self._abandon("cancelled", "the server is stopping")

    def _step(self) -> None:
        self._swap_in()
        self._drop_cancelled()
        self._admit()
        if self._rows:
            self._round()

    def _swap_in(self) -> None:
        swap = self._inbox.take_swap()
        if swap is None:
            return
        slots = None
        if swap.drafter is not None:
            attention.install(swap.drafter.decoder)
            slots = Slots(swap.drafter.config.layers, self._config.slots, self._capacity, self._target.device)
        self._live = Live(swap.version, swap.drafter, slots)
        for row in self._rows:
            row.drafter_length = 0
        log.info("drafter.swapped", version=swap.version, rows=len(self._rows))
        swap.done.set_result(swap.version)

    def _drop_cancelled(self) -> None:
        ids, waiting = self._inbox.take_cancelled()
        for generation in waiting:
            self._finish(generation, "cancelled")
        for row in [r for r in self._rows if r.generation.request_id in ids]:
            self._leave(row, "cancelled")

    def _admit(self) -> None:
        while len(self._rows) < self._config.slots and (generation := self._inbox.take_request()) is not None:
            self._join(generation)

    def _join(self, generation: Generation) -> None:
        """Prefill a request's prompt and sample its first token."""
        generator = None
        if not generation.policy.greedy:
            generator = torch.Generator()
            generator.seed() if generation.seed is None else generator.manual_seed(generation.seed)
        text = TextStream(self._target.tokenizer, generation.stop)
        row = Row(generation, text, generator, list(generation.prompt_ids))
        self._rows.append(row)
        logits = prefill(self._target, self._slots, len(self._rows) - 1, row.sequence, self._config.prefill_chunk)
        row.target_length = len(row.sequence)
        generation.first_token_at = perf_counter()
        self._commit(row, [draw(distribution(logits.cpu(), generation.policy), generator)])

    def _round(self) -> None:
        live, rows = self._live, list(self._rows)
        lengths = [self._draft_length(row) if live.drafter is not None else 0 for row in rows]
        try:
            result = play(self._target, self._slots, live, rows, lengths, self._config.teacher_top_k)
        except Exception:
            if live.drafter is None:
                raise
            # Whatever is wrong with the drafter, the text does not depend on it: go on without.
            log.exception("drafter.failed", version=live.version)
            self.drafter_faults += 1
            self._live = Live(live.version)
            return
        for row, outcome in zip(rows, result.outcomes, strict=True):
            self._note(row, outcome, result, live.version)
            self._commit(row, outcome.tokens)

    def _draft_length(self, row: Row) -> int:
        wanted = self._config.draft_length if row.generation.draft_length is None else row.generation.draft_length
        return min(wanted, self._config.draft_length, row.remaining)

    def _note(self, row: Row, outcome: Outcome, result: RoundResult, version: int) -> None:
        if not outcome.proposed:
            return
        generation = row.generation
        generation.rounds.append(
            Round(
                start=len(generation.output_ids),
                version=version,
                proposed=outcome.proposed,
                accepted=outcome.accepted,
                rejected_token=outcome.rejected_token,
                rejected_q=outcome.rejected_q,
                draft_ms=round(result.draft_ms, 3),
                verify_ms=round(result.verify_ms, 3),
            )
        )
        if outcome.teacher is not None:
            generation.teacher.append(outcome.teacher)

    def _commit(self, row: Row, tokens: list[int]) -> None:
        """Append a round's tokens until the request ends; tell the listener."""
        generation, text, kept = row.generation, "", []
        for token in tokens:
            kept.append(token)
            generation.output_ids.append(token)
            row.sequence.append(token)
            text += row.text.push(token)
            if token in self._target.eos_ids or row.text.stopped:
                generation.finish_reason = "stop"
            elif row.remaining == 0:
                generation.finish_reason = "length"
            if generation.finish_reason:
                self._leave(row, generation.finish_reason, Delta(text + row.text.flush(), tuple(kept)))
                return
        self._tell(generation, Delta(text, tuple(kept)))

    def _leave(self, row: Row, reason: str, last: Delta | None = None) -> None:
        """Free a row's slot: the last row moves into the hole, so that live rows stay together."""
        hole, end = self._rows.index(row), len(self._rows) - 1
        if hole != end:
            self._slots.move(end, hole)
            if self._live.slots is not None:
                self._live.slots.move(end, hole)
        self._rows[hole] = self._rows[end]
        self._rows.pop()
        self._finish(row.generation, reason, last)

    def _finish(self, generation: Generation, reason: str, last: Delta | None = None, error: str = "") -> None:
        generation.finish_reason = reason
        generation.finished_at = perf_counter()
        generation.rounds = clipped(generation.rounds, len(generation.output_ids))
        generation.teacher = [t for t in generation.teacher if t.position < len(generation.output_ids)]
        last = last or Delta("", ())
        self._on_finished(generation)
        self._tell(generation, Delta(last.text, last.token_ids, reason, usage(generation), error))

    def _abandon(self, reason: str, error: str) -> None:
        rows, self._rows = self._rows, []
        for generation in [row.generation for row in rows] + self._inbox.take_all():
            self._finish(generation, reason, error=error)

    def _tell(self, generation: Generation, delta: Delta) -> None:
        try:
            generation.listener(delta)
        except Exception:
            log.exception("engine.listener_failed", request_id=generation.request_id)
