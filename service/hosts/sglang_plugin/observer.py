"""Rounds as SGLang verified them, and what is left of each finished request: a feedback record.

`verified` is called when the accepted counts of a batch are on the CPU, before the tokens are added to the requests;
`settled` after a request's tokens were added and it was seen whether it is finished. SGLang says how many proposals
were accepted, but not which was refused, nor the target's logits: the worker computes them again (REDRAFT_TEACHER).

Nothing here is raised into the scheduler: a fault of ours is counted, said once, and the request goes unrecorded.
"""

import importlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import structlog

from service.engine.generation import clipped
from service.hosts.inside import sender
from service.hosts.sglang_plugin.loader import loaded
from service.origin import Origin, resident_mb
from service.recording import teacher_rows
from storage.records import SCHEMA_VERSION, FeedbackRecord, Round, int32

SOURCE = "sglang"
HELD = 4096  # requests under way; beyond, the oldest are forgotten
EVERYTHING = 1 << 30  # SGLang's top_k of "all tokens"

log = structlog.get_logger()

Put = Callable[[FeedbackRecord], None]


@dataclass
class Seen:
    """A request under way."""

    began: float
    rounds: list[Round] = field(default_factory=list)


class Observer:
    """One scheduler's. `origin` is None until it is known whose tokens these are; nothing is recorded before."""

    def __init__(
        self, put: Put, origin: Callable[[], Origin | None], lossless: Callable[[], bool], depth: Callable[[], int]
    ) -> None:
        """`depth()`: how many tokens deep SGLang's proposals are."""
        self._put, self._origin, self._lossless, self._depth = put, origin, lossless, depth
        self._seen: dict[str, Seen] = {}
        self.recorded = self.faults = 0

    def verified(self, batch: Any, result: Any) -> None:
        """Note the round of each request that goes on."""
        try:
            depth, version = self._depth(), loaded().version
            if version == 0:
                return  # what SGLang was started with is no version
            for req, accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
                if not req.is_retracted and not req.finished():
                    self._note(req, accepted, depth, version)
        except Exception as error:
            self._fault(error)

    def settled(self, req: Any) -> None:
        """Record a request that is finished."""
        try:
            if req.finished():
                seen, origin = self._seen.pop(req.rid, None), self._origin()
                if seen is not None and origin is not None:
                    self._put(record_of(req, seen, origin, self._lossless()))
                    self.recorded += 1
        except Exception as error:
            self._fault(error)

    def _note(self, req: Any, accepted: int, depth: int, version: int) -> None:
        seen = self._seen.get(req.rid)
        if seen is None:
            while len(self._seen) >= HELD:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[req.rid] = Seen(time.time())
        seen.rounds.append(Round(len(req.output_ids), version, max(depth, accepted), accepted, -1, 0.0, 0.0, 0.0))

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            log.warning("sglang.not_observed", error=type(error).__name__, reason=str(error))


def record_of(req: Any, seen: Seen, origin: Origin, lossless: bool) -> FeedbackRecord:
    """The record of a finished request."""
    sampling, output = req.sampling_params, list(req.output_ids_through_stop)
    workload, tenant, train = sender(sampling.custom_params if isinstance(sampling.custom_params, dict) else {})
    greedy = sampling.top_k == 1  # SGLang says temperature 0 so
    prompt = list(req.origin_input_ids)
    return FeedbackRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{SOURCE}-{uuid.uuid4().hex}",
        request_id=req.rid,
        finished_at=time.time(),
        tenant=tenant,
        workload=workload,
        source=SOURCE,
        target_fingerprint=origin.target_fingerprint,
        tokenizer_fingerprint=origin.tokenizer_fingerprint,
        drafter=origin.drafter,
        temperature=0.0 if greedy else float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=0 if greedy or sampling.top_k >= EVERYTHING else int(sampling.top_k),
        structured=req.grammar is not None,
        lossless=lossless,
        train=train,
        prompt_ids=int32(prompt if train else [0] * len(prompt)),
        output_ids=int32(output if train else [0] * len(output)),
        finish_reason=str((req.finished_reason.to_json() or {}).get("type", "")),
        rounds=committed(seen.rounds, len(output)),
        teacher=teacher_rows([]),
        time_to_first_token_ms=0.0,
        total_ms=(time.time() - seen.began) * 1000,
        resident_mb=resident_mb(),
        adjusted=_adjusts(sampling),
    )


def committed(rounds: list[Round], length: int) -> tuple[Round, ...]:
    """The rounds as far as their tokens are among the output's `length`; what was not committed was not proposed."""
    return tuple(clipped([played for played in rounds if played.start < length], length))


def _adjusts(sampling: Any) -> bool:
    return bool(
        sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
    )  # fmt: skip


@cache
def observer() -> Observer:
    """This process' own. The first rank of the scheduler writes, the others only look on."""
    from service.hosts.sglang_plugin.attaching import Attachment

    context = importlib.import_module("sglang.srt.runtime_context")
    attachment = Attachment(context.get_server_args(), writes=context.get_parallel().tp_rank == 0)
    attachment.start()
    spec = context.get_spec()
    return Observer(
        attachment.put, lambda: attachment.origin, lambda: attachment.lossless, lambda: int(spec.speculative_num_steps)
    )
