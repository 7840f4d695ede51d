"""What a client gets back, in OpenAI's wire format: a whole answer, or the chunks of a stream.

The two formats, `ChatReply` and `CompletionReply`, have the same four methods, so that one flow serves both.
The extra fields (`token_ids`, `prompt_token_ids`, `metrics`) have vLLM's names and places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from adapter.acceptance import Acceptance
from adapter.spelling import Spelling
from adapter.typical import Typical
from service.engine.generation import Delta, Usage
from service.openai_logprobs import CompletionLogprobs, Json, chat_logprobs


@dataclass(frozen=True)
class Envelope:
    """What every answer to one request carries, and what its client asked to see."""

    request_id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str
    prompt_ids: list[int]
    draft_length: int  # k of this request
    include_usage: bool  # of a stream; a whole answer always carries its usage
    return_token_ids: bool
    tokens_as_ids: bool  # in log-probabilities
    return_metrics: bool
    spelling: Spelling | None  # of the target, where log-probabilities are asked for
    typical: Typical | None = None  # LOSSY: the rule that proposals were accepted by; None: verified exactly

    def body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **self._acceptance(),
        }

    @property
    def headers(self) -> dict[str, str]:
        """A lossy answer says so where every client and proxy can see it."""
        return {} if self.typical is None else {"X-Redraft-Acceptance": "typical, lossy"}

    def _acceptance(self) -> Json:
        if self.typical is None:
            return {}
        return {"acceptance": {"rule": "typical", "lossless": False, **vars(self.typical)}}

    def token_ids(self, ids: Sequence[int]) -> Json:
        return {"token_ids": list(ids)} if self.return_token_ids else {}

    def prompt_token_ids(self) -> Json:
        return {"prompt_token_ids": self.prompt_ids} if self.return_token_ids else {}

    def metrics(self, usage: Usage) -> Json:
        if not self.return_metrics:
            return {}
        return {"metrics": {"speculative_decoding": figures(usage, self.draft_length) | self._acceptance()}}

    def unfinished_usage(self) -> Json:
        """OpenAI: with include_usage, every chunk but the last says `usage: null`."""
        return {"usage": None} if self.include_usage else {}

    def endings(self, kind: str, choice: Json, usage: Usage) -> list[Json]:
        """The chunk with the finish reason, then the usage if asked for; the last one has the metrics."""
        chunks = [self.body(kind, [choice]) | self.unfinished_usage()]
        if self.include_usage:
            chunks.append(self.body(kind, []) | {"usage": counts(usage)})
        chunks[-1] |= self.metrics(usage)
        return chunks


@dataclass(frozen=True)
class ChatReply:
    """The answers of /v1/chat/completions."""

    envelope: Envelope

    def whole(self, answer: Delta, usage: Usage) -> Json:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
            **self.envelope.token_ids(answer.token_ids),
        }
        body = self.envelope.body("chat.completion", [choice])
        return body | {"usage": counts(usage)} | self.envelope.prompt_token_ids() | self.envelope.metrics(usage)

    def opening(self) -> list[Json]:
        """The chunk that says who speaks, before any text."""
        return [self._chunk({"role": "assistant", "content": ""}) | self.envelope.prompt_token_ids()]

    def piece(self, delta: Delta, first: bool) -> Json:
        extra = {"logprobs": self._logprobs(delta)} | self.envelope.token_ids(delta.token_ids)
        return self._chunk({"content": delta.text}, extra)

    def closing(self, finish_reason: str, usage: Usage) -> list[Json]:
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason}
        return self.envelope.endings("chat.completion.chunk", choice, usage)

    def _chunk(self, delta: Json, extra: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **(extra or {})}
        return self.envelope.body("chat.completion.chunk", [choice]) | self.envelope.unfinished_usage()

    def _logprobs(self, delta: Delta) -> Json | None:
        spelling, by_id = self.envelope.spelling, self.envelope.tokens_as_ids
        return None if spelling is None else chat_logprobs(spelling, delta.logprobs, by_id)


@dataclass(frozen=True)
class CompletionReply:
    """The answers of /v1/completions."""

    envelope: Envelope
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)

    def whole(self, answer: Delta, usage: Usage) -> Json:
        extra = self._extra(answer) | self.envelope.prompt_token_ids()
        body = self.envelope.body("text_completion", [self._choice(answer.text, answer.finish_reason) | extra])
        return body | {"usage": counts(usage)} | self.envelope.metrics(usage)

    def opening(self) -> list[Json]:
        """Nothing: a completion's stream starts with text."""
        return []

    def piece(self, delta: Delta, first: bool) -> Json:
        extra = self._extra(delta) | (self.envelope.prompt_token_ids() if first else {})
        chunk = self.envelope.body("text_completion", [self._choice(delta.text, None) | extra])
        return chunk | self.envelope.unfinished_usage()

    def closing(self, finish_reason: str, usage: Usage) -> list[Json]:
        return self.envelope.endings("text_completion", self._choice("", finish_reason), usage)

    def _choice(self, text: str, finish_reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _extra(self, delta: Delta) -> Json:
        ids, spelling = self.envelope.token_ids(delta.token_ids), self.envelope.spelling
        if spelling is None:
            return ids
        return ids | {"logprobs": self.logprobs.piece(spelling, delta.logprobs, self.envelope.tokens_as_ids)}


def counts(usage: Usage) -> Json:
    """OpenAI's usage object."""
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def figures(usage: Usage, draft_length: int) -> Json:
    """A request's speculative figures under vLLM's names, and the version of its last round (null: no round).

    The histogram is dense, of length k + 1: entry j counts the rounds that accepted j tokens.
    """
    acceptance = Acceptance.of([(r.proposed, r.accepted) for r in usage.rounds])
    histogram = list(acceptance.histogram) + [0] * (draft_length + 1 - len(acceptance.histogram))
    return {
        "mean_acceptance_length": acceptance.length,
        "draft_acceptance_rate": acceptance.rate,
        "acceptance_histogram": histogram if acceptance.rounds else [0] * (draft_length + 1),
        "num_spec_steps": acceptance.rounds,
        "num_accepted_draft_tokens": acceptance.accepted,
        "num_draft_tokens": acceptance.proposed,
        "num_spec_tokens": draft_length,
        "per_step_accepted": [r.accepted for r in usage.rounds],
        "per_step_drafted": [r.proposed for r in usage.rounds],
        "drafter_version": usage.rounds[-1].version if usage.rounds else None,
    }
