"""Which requests can be observed, and how the engine is asked for more than the client asked for.

The client's own fields stay as they are. A request that is not plain text generation of the served model, or that asks
for something with which the additions would quarrel, is left alone and passes as it came.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from service.hosts.sidecar.dialects import Dialect, Form
from service.hosts.sidecar.excision import NotPlain, with_member

_LARGE: Final = ("n", "best_of")  # answers: more than one says nothing about its rounds
_FOREIGN: Final = (
    "echo", "suffix", "prompt_logprobs", "logprob_token_ids", "use_beam_search", "prompt_embeds", "audio",
    "kv_transfer_params", "lora_path", "session_params", "return_flat_raw_output_top_logprobs",
)  # fmt: skip
_FORMS: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "grammar",
    "json_schema", "functions",
)  # fmt: skip
_ADJUSTING: Final = (
    "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids",
    "logits_processors", "custom_logit_processor", "watermarking", "watermark", "thinking_token_budget",
    "dry_multiplier", "xtc_probability", "mirostat",
)  # fmt: skip


@dataclass(frozen=True)
class Wants:
    """What of the additions the client asked for itself: that stays in the answer."""

    token_ids: bool
    logprobs: bool
    usage: bool
    metrics: bool


@dataclass(frozen=True)
class Asked:
    """A request as far as its record needs it."""

    form: Form
    wants: Wants
    temperature: float | None
    top_p: float
    top_k: int
    bound: bool  # the output has to take a form
    limit: int | None  # tokens of the output at most
    adjusted: bool  # penalties, biases and the like: what is emitted is not the target's own choice
    messages: Any = None  # of a chat, where an engine has to be asked for the prompt's ids; else the prompt


def read(form_path: str, body: bytes, model: str) -> Asked | None:
    """The request, or None where it cannot be observed."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict) or not _plain(fields, model):
        return None
    form = Form(form_path, fields.get("stream") is True)
    options = fields.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    if isinstance(options, dict) and options.get("continuous_usage_stats") and not usage:
        return None  # to ask for the usage would switch that on
    return Asked(
        form=form,
        wants=Wants(
            token_ids=bool(fields.get("return_token_ids")),
            logprobs=_wants_logprobs(fields, form),
            usage=usage,
            metrics=bool(fields.get("return_metrics")),
        ),
        temperature=_number(fields.get("temperature")),
        top_p=_or(_number(fields.get("top_p")), 1.0),
        top_k=max(int(_or(_number(fields.get("top_k")), 0)), 0),
        bound=_is_bound(fields),
        limit=_limit(fields, form),
        adjusted=_is_adjusted(fields),
        messages=fields.get("messages") if form.chat else fields.get("prompt"),
    )


def _plain(fields: Mapping[str, Any], model: str) -> bool:
    """Text to text, one answer, by the target itself."""
    if fields.get("model") not in (None, "", model) or any(fields.get(name) for name in _FOREIGN):
        return False
    if any(fields.get(name) not in (None, 1) for name in _LARGE) or fields.get("stream") not in (None, False, True):
        return False
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if messages is not None:
        return isinstance(messages, list) and all(map(_is_text, messages))
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int)


def _is_text(message: Any) -> bool:
    """Pictures and sounds are tokens that a drafter cannot be shown."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return isinstance(message, dict)
    return all(isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in content)


def _wants_logprobs(fields: Mapping[str, Any], form: Form) -> bool:
    if form.chat:
        return bool(fields.get("logprobs")) or fields.get("top_logprobs") is not None
    return fields.get("logprobs") is not None


def _is_bound(fields: Mapping[str, Any]) -> bool:
    """Tools count unless they are switched off: engines may hold a call to its schema."""
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    return tools or any(fields.get(name) for name in _FORMS)


def _is_adjusted(fields: Mapping[str, Any]) -> bool:
    repetition = fields.get("repetition_penalty", fields.get("repeat_penalty"))
    extras = fields.get("vllm_xargs") or {}
    foreign = not isinstance(extras, dict) or any(not str(name).startswith("redraft_") for name in extras)
    return foreign or repetition not in (None, 1, 1.0) or any(fields.get(name) for name in _ADJUSTING)


def _limit(fields: Mapping[str, Any], form: Form) -> int | None:
    """As at OpenAI, a completion that names none has 16."""
    given = _number(fields.get("max_completion_tokens")) if form.chat else None
    given = _number(fields.get("max_tokens")) if given is None else given
    if given is None:
        return None if form.chat else 16
    return int(given)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def asking(body: bytes, asked: Asked, dialect: Dialect, top_k: int) -> bytes | None:
    """The client's body with what the engine is asked for besides; None where it cannot be added."""
    fields = dialect.asks(asked.form, top_k)
    if asked.wants.logprobs:  # the client's own number of them, spelt as it asked for
        for name in ("logprobs", "top_logprobs", "return_tokens_as_token_ids"):
            fields.pop(name, None)
    try:
        for name, value in fields.items():
            body = with_member(body, name, msgspec.json.encode(value))
        if dialect.usage and asked.form.stream and not asked.wants.usage:
            body = _with_usage(body)
    except NotPlain:
        return None
    return body


def _with_usage(body: bytes) -> bytes:
    options = msgspec.json.decode(body).get("stream_options") or {}
    return with_member(body, "stream_options", msgspec.json.encode({**options, "include_usage": True}))
