"""A checked body and its headers to a generation: what the engine is to do, by whom it was asked."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Header

from adapter.policy import Policy
from service.deltas import Deltas
from service.engine.generation import Generation
from service.openai_errors import bad_request
from service.openai_schema import ChatRequest, CompletionRequest

Body = ChatRequest | CompletionRequest
Label = Annotated[str, Header(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


@dataclass(frozen=True)
class Labels:
    """What a request says of itself in its X-Redraft-* headers."""

    workload: str
    tenant: str
    train: bool  # False: its record is never trained on
    draft_length: int | None  # None: the engine's


def labels(
    x_redraft_workload: Label = "default",
    x_redraft_tenant: Label = "default",
    x_redraft_train: Annotated[Literal["yes", "no"], Header()] = "yes",
    x_redraft_draft_length: Annotated[int | None, Header(ge=0)] = None,
) -> Labels:
    """The X-Redraft-* headers."""
    return Labels(x_redraft_workload, x_redraft_tenant, x_redraft_train == "yes", x_redraft_draft_length)


Asked = Annotated[Labels, Depends(labels)]


def generation(
    request_id: str, body: Body, asked: Labels, prompt_ids: list[int], context: int, deltas: Deltas
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
    )


def _policy(body: Body) -> Policy:
    return Policy(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
    )


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
