"""What an engine is asked for when it scores a prompt, how it answers, and the answer as rows in the wire format.

vLLM and SGLang each have a way: both tell, for each token of a prompt, the likeliest ones in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from adapter.rescore import wanted
from storage.records import FeedbackRecord, TeacherRows, int32
from worker.engine_http import Http, RequestRefused

NOTHING: Final = 1e-6  # of mass outside the top K: what is left of the sum's own rounding
Likeliest = list[tuple[float, int]]  # (log-probability, id), the likeliest first


class Scoring(Protocol):
    """One engine's way."""

    @property
    def top_k(self) -> int: ...

    def score(self, tokens: Sequence[int]) -> list[Likeliest]:
        """For each token, the K likeliest in its place; nothing for the first. Raises `RequestRefused`."""
        ...


@dataclass(frozen=True)
class VllmScoring:
    """`prompt_logprobs` of its OpenAI server; the one whose rank is beyond K is the token itself, told as well."""

    http: Http
    model: str
    top_k: int
    name: ClassVar[str] = "prompt_logprobs"

    def score(self, tokens: Sequence[int]) -> list[Likeliest]:
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.top_k, "vllm_xargs": {"redraft_train": "no"},
        }  # fmt: skip
        answer = self.http.post_json("/v1/completions", body)
        return [self._ranked(one) for one in _listed(answer, len(tokens), "choices", 0, "prompt_logprobs")]

    def _ranked(self, told: Any) -> Likeliest:
        if not told:
            return []
        try:
            ranked = sorted((int(one["rank"]), float(one["logprob"]), int(token)) for token, one in told.items())
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RequestRefused(f"log-probabilities in another form: {error!r}") from error
        return [(log_prob, token) for _, log_prob, token in ranked[: self.top_k]]


@dataclass(frozen=True)
class SglangScoring:
    """`/generate` with `return_logprob` from the prompt's start, and no new tokens."""

    http: Http
    model: str
    top_k: int
    name: ClassVar[str] = "input_top_logprobs"

    def score(self, tokens: Sequence[int]) -> list[Likeliest]:
        body = {
            "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": self.top_k,
        }  # fmt: skip
        answer = self.http.post_json("/generate", body)
        try:
            return [
                [(float(one[0]), int(one[1])) for one in told or ()]
                for told in _listed(answer, len(tokens), "meta_info", "input_top_logprobs")
            ]
        except (LookupError, TypeError, ValueError) as error:
            raise RequestRefused(f"log-probabilities in another form: {error!r}") from error


def rows_of(scoring: Scoring, record: FeedbackRecord) -> TeacherRows:
    """The target's rows at every output position but the first, which no drafter proposes for."""
    positions, first = wanted(record, "verified"), len(record.prompt)
    scored = scoring.score(np.concatenate([record.prompt, record.output]).tolist())
    return _rows([int(position) for position in positions], [scored[first + p] for p in positions], scoring.top_k)


def _rows(positions: list[int], scored: Sequence[Likeliest], top_k: int) -> TeacherRows:
    if short := [len(likeliest) for likeliest in scored if len(likeliest) != top_k]:
        raise RequestRefused(f"{short[0]} log-probabilities at a position, not {top_k}")
    ordered = [sorted(likeliest, key=lambda one: -one[0]) for likeliest in scored]
    log_probs = np.array([[one[0] for one in row] for row in ordered], dtype="<f4")
    ids = np.array([[one[1] for one in row] for row in ordered], dtype="<i4")
    outside = 1.0 - np.exp(log_probs.astype(np.float64)).sum(axis=1)
    tail = np.where(outside > NOTHING, np.log(np.maximum(outside, NOTHING)), -np.inf)
    return TeacherRows(
        top_k, int32(positions), ids.tobytes(), log_probs.astype("<f2").tobytes(), tail.astype("<f4").tobytes()
    )


def _listed(answer: Any, count: int, *path: str | int) -> list[Any]:
    """What the answer has there, one for each token."""
    found = answer
    try:
        for name in path:
            found = found[name]
    except (LookupError, TypeError):
        found = None
    if not isinstance(found, list) or len(found) != count:
        raise RequestRefused(f"the answer has no {path[-1]} for the tokens that were sent")
    return found
