"""What a client may send: the request bodies of OpenAI's API, as far as redraft serves them.

A field that would change the output and is not served is accepted at its neutral value only; a field that
is not known at all is refused. Nothing that a client asks for is silently left out.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from service.openai_form import ResponseFormat, Strict, StructuredOutputs

STOP_STRINGS = 16  # at most; each is looked for after every round
STOP_TOKENS = 64
BIASES = 1024  # tokens that one request may favour or disfavour
ALTERNATIVES = 20  # likeliest tokens that may be asked for at each position
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "skip_special_tokens": (None, True),
}
"""Fields that change the output and are not served, and the values at which they do not."""

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


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
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=BIASES)] | None = None  # by token id
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in log-probabilities
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
    echo: Any = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    skip_special_tokens: Any = None

    @field_validator(*NEUTRAL)
    @classmethod
    def neutral(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what would change the output and is not served."""
        field = str(info.field_name)
        # 1 is True to Python, but n=true is no number and echo=0 no answer.
        neutral = [(free, isinstance(free, bool)) for free in NEUTRAL[field]]
        if (value, isinstance(value, bool)) not in neutral:
            raise ValueError(f"redraft does not serve {field}; leave it out")
        return value

    @field_validator("logit_bias")
    @classmethod
    def biases_by_id(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        """JSON has only text for keys: each must spell a token id."""
        if not all(re.fullmatch("0|[1-9][0-9]{0,8}", key) for key in value or ()):
            raise ValueError('logit_bias goes by token ids, such as {"50": -100}')
        return value

    @model_validator(mode="after")
    def one_form(self) -> Self:
        """What would pull at the output from two sides is a mistake."""
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.binds:
            raise ValueError("response_format and structured_outputs both say what form the output has; give one")
        if self.min_tokens and self.form is not None:
            raise ValueError(f"min_tokens would not let {self.form[0]} end where it must; leave one out")
        if self.min_tokens and self.stop is not None:
            raise ValueError("redraft does not serve min_tokens together with stop; leave one out")
        return self

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
    def form(self) -> tuple[str, ResponseFormat | StructuredOutputs] | None:
        """The field that says what form the output has, and what it says; None for free text."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs
        if self.response_format is not None and self.response_format.binds:
            return "response_format", self.response_format
        return None

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
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)

    @model_validator(mode="after")
    def alternatives(self) -> Self:
        """As at OpenAI."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def token_limit(self) -> int | None:
        """What the client allows; None for as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives_wanted(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)  # OpenAI stops at 5

    @property
    def token_limit(self) -> int:
        """What the client allows; 16 where it does not say, as at OpenAI."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def alternatives_wanted(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None: no log-probabilities."""
        return self.logprobs
