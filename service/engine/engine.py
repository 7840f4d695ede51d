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

from adapter.drafters.causal_lm import CausalLM
from adapter.packing import pack
from adapter.target import Target
from service.engine import attention
from service.engine.accept import Outcome
from service.engine.audit import Audit
from service.engine.batch import Batch
from service.engine.commit import commit, note
from service.engine.floor import Broken, Floor, FloorConfig, Proposed
from service.engine.generation import Delta, Generation, Row, clipped, usage
from service.engine.governor import Governor, GovernorConfig
from service.engine.inbox import Inbox
from service.engine.memory import KvMemory, position_bytes
from service.engine.pace import Pace, class_of
from service.engine.prompts import Prompts
from service.engine.residents import Resident, Residents
from service.engine.rounds import RoundResult, first_token, play
from service.engine.slots import Slots
from storage.config import setting

NOTHING_NEW = Delta("", ())

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
    prefill_chunk: int = setting(256, "prompt tokens read between two rounds")
    kv_memory: float = setting(4.0, "GiB that keys and values may take; what needs more is refused at the start")
    teacher_top_k: int = setting(64, "target probabilities kept at a rejection position")
    audit_share: float = setting(0.01, "share of greedy requests that are decoded again plainly and compared")


class Engine:
    """Decodes for many clients at once. `on_finished` is called from the engine's thread and must not block."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        on_finished: Callable[[Generation], None],
        governor: GovernorConfig = GovernorConfig(),
        floor: FloorConfig = FloorConfig(),
    ) -> None:
        """Raises `MemoryBound` where the slots do not fit, and `NotServed` for a target without plain attention."""
        self._target, self._config, self._on_finished = target, config, on_finished
        self.context = min(config.context, target.context)
        capacity = self.context + config.draft_length + 2  # padding of a batch may stand past a row's end
        attention.install(target.model)
        self._memory = KvMemory(config.kv_memory, config.slots, capacity)
        self._target_bytes = position_bytes(target.model.get_decoder())
        self._memory.check("target", self._target_bytes)
        self._slots = Slots(target.model.get_decoder(), config.slots, capacity)
        self._residents = Residents()
        self.floor = Floor(floor)
        self._batch = Batch(config.slots, self._move)
        self._inbox = Inbox(config.waiting)
        self._prompts = Prompts(target, self._slots, self._batch, self._inbox, config.prefill_chunk)
        self.governor = Governor(config.draft_length, governor) if governor.governor and config.draft_length else None
        self._pace = Pace(config.draft_length, self.governor)
        self.audit = Audit(target, config.audit_share, self._inbox.submit_audit)
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
        live = self._residents.live
        return live.version if live.drafter is not None else 0

    @property
    def drafter_faults(self) -> int:
        return self._residents.faults

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
        self._inbox.submit(generation)

    def cancel(self, request_id: str) -> None:
        """Free a request's slot before the next round."""
        self._inbox.cancel(request_id)

    def swap(
        self, version: int, drafter: CausalLM | None, holdback: float = 0.0, guarded: bool = False
    ) -> "Future[int]":
        """Replace the drafter before the next round; the future gives the version once it is in.

        That share of the requests stays on the drafter that was live. A guarded one is new: where its first rounds
        are below the floor, the engine goes back by itself. What costs time is done here, in the caller's thread.
        Raises `MemoryBound` where the drafter's keys and values do not fit.
        """
        if drafter is None:
            return self._inbox.swap(Resident(version), holdback, guarded)
        attention.install(drafter.decoder)
        pack(drafter)
        taken = self._memory.needed(self._target_bytes)
        if holdback > 0 and (before := self._residents.live.drafter) is not None:
            taken += self._memory.needed(position_bytes(before.decoder))
        self._memory.check(f"drafter version {version}", position_bytes(drafter.decoder), taken)
        slots = Slots(drafter.decoder, self._memory.count, self._memory.capacity)
        return self._inbox.swap(Resident(version, drafter, slots), holdback, guarded)

    def release(self) -> "Future[int]":
        """End the holdback before the next round: the live drafter proposes for every request."""
        return self._inbox.swap(None)

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
        swap = self._inbox.take_swap()
        if swap is None:
            return
        if swap.resident is None:
            self._residents.release()
            swap.done.set_result(self._residents.live.version)
            return
        self.floor.swapped(swap.resident.version, self._residents.live.version, swap.guarded)
        self._residents.swap(swap.resident, swap.holdback)
        if self.governor is not None:
            self.governor.rearm()
        log.info("drafter.swapped", version=swap.resident.version, rows=len(self._batch))
        swap.done.set_result(swap.resident.version)

    def _drop_cancelled(self) -> None:
        ids, waiting = self._inbox.take_cancelled()
        for generation in waiting:
            self._finish(generation, "cancelled")
        for row in [r for r in self._batch.all if r.generation.request_id in ids]:
            self._leave(row, NOTHING_NEW, "cancelled")

    def _read_prompts(self) -> None:
        for row, logits in self._prompts.read():
            self._commit(row, first_token(self._target, row, logits, self._config.teacher_top_k))

    def _round(self) -> None:
        began, rows = perf_counter(), list(self._batch.rows)
        lengths = self._pace.lengths(rows) if self._residents.proposing else [0] * len(rows)
        versions = [self._residents.of(row.generation.request_id).version for row in rows]
        try:
            result = play(self._target, self._slots, self._residents, rows, lengths, self._config.teacher_top_k)
        except Exception:
            asked = {version for version, length in zip(versions, lengths, strict=True) if length}
            if not asked:
                raise
            # Whatever is wrong with a drafter, the text does not depend on it: go on without.
            log.exception("drafter.failed", versions=sorted(asked))
            self._residents.failed(asked)
            self._go_back(self.floor.failed(asked))
            return
        for row, outcome, version in zip(rows, result.outcomes, versions, strict=True):
            note(row, outcome, result, version)
            self._commit(row, outcome)
        self._pace.learn(rows, result, (perf_counter() - began) * 1e3)
        self._guard(rows, versions, result)

    def _guard(self, rows: list[Row], versions: list[int], result: RoundResult) -> None:
        """Go back before the next round where a new version is below the floor."""
        seen = zip(rows, versions, result.outcomes, strict=True)
        played = [
            Proposed(row.generation.request_id, class_of(row), version, outcome.proposed, outcome.accepted)
            for row, version, outcome in seen
            if outcome.proposed
        ]
        self._go_back(self.floor.note(played))

    def _go_back(self, broken: Broken | None) -> None:
        if broken is not None and broken.version == self._residents.live.version:
            log.warning("drafter.taken_back", version=broken.version, reason=broken.reason)
            self._residents.take_back()
            if self.governor is not None:
                self.governor.rearm()

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
        generation.teacher = [t for t in generation.teacher if t.position < len(generation.output_ids)]
        if not generation.audit:
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
