"""vLLM's requests while they are decoded: what was proposed, what came back, and where each output ends.

A proposal is made after one step and verified in the next: what comes back then is its accepted prefix and one token
of the target's own. vLLM's scheduler ends a request without a word to the worker, and the round that ended it may
hold tokens past the end: these are neither accepted nor rejected.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from adapter.policy import Policy
from service.engine.floor import Proposed
from service.engine.generation import Delta, Generation, clipped
from service.engine.survival import RowClass
from service.hosts.inside import sender
from storage.records import Round


@dataclass(frozen=True)
class Open:
    """A proposal that was not verified yet."""

    start: int  # output index of its first token
    tokens: list[int]
    version: int
    draft_ms: float
    at: float


@dataclass(eq=False)
class Request:
    """One request."""

    generation: Generation
    structured: bool
    adjusted: bool  # by what a policy of redraft's does not name
    open: Open | None = None
    end: int | None = None  # tokens of the output, where its last one is known

    @cached_property
    def row_class(self) -> RowClass:
        return RowClass(self.generation.workload, self.generation.policy.bucket)

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return 0 if self.end is not None else self.generation.max_tokens - len(self.generation.output_ids)


class Requests:
    """All requests in the engine. Only its thread uses this."""

    def __init__(self, context: int) -> None:
        """`context`: tokens of prompt and output that a request may have."""
        self._context = context
        self._requests: dict[str, Request | None] = {}
        self._began: dict[str, float] = {}
        self.strange = 0  # rounds that were not as proposed: vLLM put tokens of its own in, near the context's end
        self.missed = 0  # times that tokens were committed in steps that the proposer was not called in

    def began(self, request_ids: Sequence[str]) -> None:
        moment = time.perf_counter()
        self._began.update(dict.fromkeys(request_ids, moment))

    def of(self, request_id: str, state: Any) -> Request | None:
        """The request with this id, made from the runner's state of it; None for one that is not recorded."""
        if request_id not in self._requests:
            self._requests[request_id] = None  # and so it stays where the next lines fail
            if recordable(state):
                began = self._began.pop(request_id, time.perf_counter())
                self._requests[request_id] = made(request_id, state, self._context, began)
        return self._requests[request_id]

    def learn(
        self, request: Request, committed: Sequence[int], verified: Sequence[int], output: Sequence[int]
    ) -> Proposed | None:
        """Take in what a step gave: the accepted tokens of what it verified, and one of the target's own.

        `output` is all of the output so far, as the runner has it.
        """
        generation, moment = request.generation, time.perf_counter()
        self._catch_up(request, output, len(output) - len(committed))
        generation.first_token_at = generation.first_token_at or moment
        generation.finished_at = moment
        found = self._round(request, committed, verified, moment) if verified else None
        request.open = None
        request.end = end_of(generation, committed)
        generation.output_ids.extend(committed)
        if found is None:
            return None
        generation.rounds.append(found)
        inside = clipped([found], len(generation.output_ids) if request.end is None else request.end)[0]
        return Proposed(generation.request_id, request.row_class, inside.version, inside.proposed, inside.accepted)

    def proposed(self, request: Request, tokens: list[int], version: int, draft_ms: float) -> None:
        """Remember what the next step is to verify."""
        if tokens:
            start = len(request.generation.output_ids)
            request.open = Open(start, tokens, version, draft_ms, time.perf_counter())

    def finish(self, request_id: str, output: Sequence[int]) -> Request | None:
        """The request as it ended, with all of its output, the runner's; None where it is not recorded."""
        self._began.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        generation = request.generation
        self._catch_up(request, output, len(output))
        if request.end is not None:
            del generation.output_ids[request.end :]
        generation.rounds = clipped(generation.rounds, len(generation.output_ids))
        generation.finish_reason = _reason(generation, request.end)
        return request

    def _catch_up(self, request: Request, output: Sequence[int], until: int) -> None:
        """Tokens before `until`, of steps without the proposer: vLLM leaves it out while a row nears the context's end.

        What became of the proposal that such a step verified is not known.
        """
        missed = output[len(request.generation.output_ids) : until]
        if missed:
            self.missed += 1
            request.open, request.end = None, end_of(request.generation, missed)
            request.generation.output_ids.extend(missed)

    def _round(
        self, request: Request, committed: Sequence[int], verified: Sequence[int], moment: float
    ) -> Round | None:
        """What became of the proposal. vLLM verifies as much of it as it finds room for."""
        open_, accepted, proposed = request.open, len(committed) - 1, len(verified)
        if (
            open_ is None
            or list(verified) != open_.tokens[:proposed]
            or list(verified[:accepted]) != list(committed[:accepted])
        ):
            self.strange += 1
            return None
        rejected = accepted < proposed
        return Round(
            start=open_.start,
            version=open_.version,
            proposed=proposed,
            accepted=accepted,
            rejected_token=verified[accepted] if rejected else -1,
            rejected_q=1.0 if rejected else 0.0,  # chosen, not drawn
            draft_ms=open_.draft_ms,
            verify_ms=(moment - open_.at) * 1e3,
        )


def recordable(state: Any) -> bool:
    """Whether a request is text from the target alone: no pictures, no embeddings, no adapter of its own."""
    return (
        state.sampling_params is not None
        and state.prompt_token_ids is not None
        and not state.mm_features
        and state.lora_request is None
    )


def made(request_id: str, state: Any, context: int, began: float) -> Request:
    """A request out of vLLM's state of it. Raises `ValueError` for a policy that redraft does not know."""
    params = state.sampling_params
    workload, tenant, train = sender(params.extra_args or {})  # a request's `vllm_xargs`
    generation = Generation(
        request_id=request_id,
        prompt_ids=list(state.prompt_token_ids),
        policy=Policy(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        ),
        max_tokens=min(params.max_tokens or context, context - len(state.prompt_token_ids)),
        listener=_nobody,
        workload=workload,
        tenant=tenant,
        train=train,
        stop_token_ids=frozenset({params.eos_token_id, *(params.stop_token_ids or ())} - {None}),
        submitted_at=began,
    )
    adjusted = bool(params.bad_words or params.allowed_token_ids or params.logit_bias or params.min_tokens)
    return Request(generation, params.structured_outputs is not None, adjusted)


def end_of(generation: Generation, committed: Sequence[int]) -> int | None:
    """Where the output ends with these tokens, as vLLM's scheduler has it (`check_stop`); None: it goes on."""
    before = len(generation.output_ids)
    for at, token in enumerate(committed, before + 1):
        if token in generation.stop_token_ids or at >= generation.max_tokens:
            return at
    return None


def _reason(generation: Generation, end: int | None) -> str:
    """By a stop string or by its client, where nothing in the tokens ended it: vLLM does not tell them apart."""
    if end is None:
        return "cancelled"
    return "stop" if generation.output_ids and generation.output_ids[-1] in generation.stop_token_ids else "length"


def _nobody(delta: Delta) -> None:
    """vLLM answers its clients itself."""
