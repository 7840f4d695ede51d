"""What a client may send: the request bodies of OpenAI's API, as far as redraft serves them.

A field that would change the output and is not served is accepted at its neutral value only; a field that
is not known at all is refused. Nothing that a client asks for is silently left out.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

STOP_STRINGS = 16  # at most; each is looked for after every round
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "skip_special_tokens": (None, True),
}
"""Fields that change the output and are not served, and the values at which they do not."""

StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class Strict(BaseModel):
    """No guessing: "0.5" is no number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; there is none here


class GenerationRequest(Strict):
    """What both kinds of request share. Defaults are OpenAI's."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=STOP_STRINGS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # 0 and -1: off
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool = False
    return_metrics: bool = False

    # Known, and without influence on the output.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    # Not served: neutral values only.
    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    echo: Any = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    skip_special_tokens: Any = None

    @field_validator(*NEUTRAL)
    @classmethod
    def neutral(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what would change the output and is not served."""
        field = str(info.field_name)
        # 0 is False to Python, but logprobs=0 asks for log-probabilities and logprobs=false does not.
        neutral = [(free, isinstance(free, bool)) for free in NEUTRAL[field]]
        if (value, isinstance(value, bool)) not in neutral:
            raise ValueError(f"redraft does not serve {field}; leave it out")
        return value

    @model_validator(mode="after")
    def streaming(self) -> Self:
        """Stream options without a stream are a mistake, as at OpenAI."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat. The chat template decides which roles there are."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_empty_fields(cls, data: Any) -> Any:
        """An answer that is sent back may carry `refusal: null` or `annotations: []`; those say nothing."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if k in cls.model_fields or v not in (None, [])}

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it, its text in one piece."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text if isinstance(text, str) else "", **named}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def token_limit(self) -> int | None:
        """What the client allows; None for as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def token_limit(self) -> int:
        """What the client allows; 16 where it does not say, as at OpenAI."""
        return 16 if self.max_tokens is None else self.max_tokens
