"""A checked body and its headers to a generation: what the engine is to do, by whom it was asked."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Header

from adapter.policy import Policy
from adapter.sampling import Constraint
from adapter.spelling import Spelling
from adapter.structured import GrammarConstraint, GrammarRefused, MinimumLength, constrain
from adapter.target import Target
from adapter.typical import Typical
from service.deltas import Deltas
from service.engine.generation import Generation
from service.openai_errors import bad_request
from service.openai_schema import ChatRequest, CompletionRequest
from storage.validation import LABEL

Body = ChatRequest | CompletionRequest
Label = Annotated[str, Header(pattern=LABEL)]


@dataclass(frozen=True)
class Labels:
    """What a request says of itself in its X-Redraft-* headers."""

    workload: str
    tenant: str
    train: bool  # False: its record is never trained on
    draft_length: int | None  # None: the engine's
    typical: bool  # LOSSY: verify by typical acceptance


def labels(
    x_redraft_workload: Label = "default",
    x_redraft_tenant: Label = "default",
    x_redraft_train: Annotated[Literal["yes", "no"], Header()] = "yes",
    x_redraft_draft_length: Annotated[int | None, Header(ge=0)] = None,
    x_redraft_acceptance: Annotated[Literal["exact", "typical"], Header()] = "exact",
) -> Labels:
    """The X-Redraft-* headers."""
    return Labels(
        x_redraft_workload,
        x_redraft_tenant,
        x_redraft_train == "yes",
        x_redraft_draft_length,
        x_redraft_acceptance == "typical",
    )


Asked = Annotated[Labels, Depends(labels)]


def check_tokens(body: Body, target: Target) -> None:
    """Token ids that a client names are the target's."""
    for field, ids in (("logit_bias", map(int, body.logit_bias or ())), ("stop_token_ids", body.stop_token_ids or ())):
        if any(token >= target.vocab_size for token in ids):
            raise bad_request(f"{field}: token ids lie between 0 and {target.vocab_size - 1}", field)


def grammar_constraint(body: Body, spelling: Spelling) -> GrammarConstraint | None:
    """The form that the client wants its answer in, compiled; None for free text. Not for the event loop."""
    if body.form is None:
        return None
    field, form = body.form
    try:
        return constrain(spelling, form.grammar())
    except GrammarRefused as refused:
        raise bad_request(f"{field}: {refused}", field) from refused


def minimum_length(body: Body, target: Target) -> MinimumLength | None:
    """What keeps the output from ending too early, if anything is to."""
    if not body.min_tokens:
        return None
    ends = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else target.eos_ids)
    return MinimumLength(body.min_tokens, ends, target.vocab_size)


def generation(
    request_id: str,
    body: Body,
    asked: Labels,
    prompt_ids: list[int],
    context: int,
    deltas: Deltas,
    constraint: Constraint | None,
    typical: Typical | None = None,
) -> Generation:
    """The request as the engine takes it; refuses one that does not fit in `context` tokens."""
    return Generation(
        request_id=request_id,
        prompt_ids=prompt_ids,
        policy=_policy(body),
        max_tokens=_max_tokens(body, len(prompt_ids), context),
        listener=deltas.put,
        stop=body.stop_strings,
        seed=body.seed,
        workload=asked.workload,
        tenant=asked.tenant,
        train=asked.train,
        draft_length=asked.draft_length,
        logprobs=body.alternatives_wanted,
        constraint=constraint,
        typical=typical,
        ignore_eos=body.ignore_eos,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
    )


def _policy(body: Body) -> Policy:
    return Policy(
        temperature=_given(body.temperature, 1.0),
        top_k=max(body.top_k or 0, 0),
        top_p=_given(body.top_p, 1.0),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: Body, prompt: int, context: int) -> int:
    """The tokens that the request may produce: what it allows, or as many as the context still holds."""
    limit = max(context - prompt, 1) if body.token_limit is None else body.token_limit
    if prompt + limit > context:
        raise bad_request(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + limit} tokens ({prompt} in the prompt, {limit} in the completion). "
            f"Please reduce one or the other.",
            "messages" if isinstance(body, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    return limit
