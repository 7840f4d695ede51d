"""What an observed answer says of its tokens and of its engine's rounds. Reads every engine's places.

Runs behind the client's back, after the last byte has gone out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from service.hosts.sidecar.rounds import Steps
from storage.records import TeacherRows, int32

TOKEN: Final = "token_id:"
Floats = npt.NDArray[np.float64]
LEAST_K: Final = 2  # a row of one token and a tail says next to nothing


@dataclass(frozen=True)
class Totals:
    """Sums over one request, where its engine tells no more."""

    rounds: int
    proposed: int
    accepted: int
    histogram: tuple[int, ...]  # rounds by accepted count; empty where it is not known


@dataclass
class Seen:
    """One answer's tokens."""

    answer_id: str = ""  # the engine's
    prompt_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None  # how many, as the usage says
    output_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    steps: Steps | None = None
    totals: Totals | None = None
    rows: list[tuple[list[int], list[float]] | None] = field(default_factory=list)  # by output index
    chosen: list[float] = field(default_factory=list)  # log-probability of each output token
    named: list[int] = field(default_factory=list)  # output ids as the log-probabilities name them

    @property
    def output(self) -> list[int]:
        return self.output_ids or self.named

    @property
    def complete(self) -> bool:
        """Whether every output token is named: llama.cpp's streams leave out those that were proposed."""
        return bool(self.output) and self.output_tokens in (None, len(self.output))


def read(texts: Sequence[bytes]) -> Seen:
    """One whole answer, or the chunks of a stream. Raises `ValueError` for what is no answer."""
    seen = Seen()
    for text in texts:
        found = msgspec.json.decode(text)
        if not isinstance(found, dict) or "error" in found:
            raise ValueError("the engine failed midway")
        _read_top(seen, found)
        for choice in found.get("choices") or ():
            _read_choice(seen, choice)
    return seen


def _read_top(seen: Seen, found: Mapping[str, Any]) -> None:
    seen.answer_id = seen.answer_id or str(found.get("id") or "")
    _take_ids(seen.prompt_ids, found.get("prompt_token_ids"))
    usage = found.get("usage")
    if isinstance(usage, dict):
        seen.prompt_tokens, seen.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    timings = found.get("timings")
    if isinstance(timings, dict):  # llama.cpp, whose streams say no usage unless they are asked
        seen.output_tokens = timings.get("predicted_n", seen.output_tokens)
    metrics = found.get("metrics")
    figures = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(figures, dict):
        seen.steps = _steps(figures)
        seen.totals = _vllm_totals(figures)
    extension = found.get("sglext")
    if isinstance(extension, dict):
        _take_ids(seen.prompt_ids, extension.get("input_ids"))
        _take_ids(seen.output_ids, (extension.get("output_ids") or [None])[0])
        seen.totals = _sglang_totals(extension.get("spec_tokens_details")) or seen.totals


def _read_choice(seen: Seen, choice: Mapping[str, Any]) -> None:
    _take_ids(seen.prompt_ids, choice.get("prompt_token_ids"))
    seen.output_ids += choice.get("token_ids") or ()
    seen.finish_reason = choice.get("finish_reason") or seen.finish_reason
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        if logprobs.get("content") is not None:
            _read_chat(seen, logprobs["content"])
        else:
            _read_completion(seen, logprobs)


def _take_ids(into: list[int], ids: Any) -> None:
    if not into and isinstance(ids, list):
        into += ids


def _steps(figures: Mapping[str, Any]) -> Steps | None:
    accepted, drafted = figures.get("per_step_accepted"), figures.get("per_step_drafted")
    if accepted is None or drafted is None:
        return None
    k = figures.get("num_spec_tokens") or max(drafted, default=0)
    return Steps(tuple(accepted), tuple(drafted), int(k))


def _vllm_totals(figures: Mapping[str, Any]) -> Totals:
    return Totals(
        rounds=int(figures.get("num_spec_steps") or 0),
        proposed=int(figures.get("num_draft_tokens") or 0),
        accepted=int(figures.get("num_accepted_draft_tokens") or 0),
        histogram=tuple(figures.get("acceptance_histogram") or ()),
    )


def _sglang_totals(details: Any) -> Totals | None:
    """Under the names of SGLang 0.5.23, or those that older ones had."""
    if isinstance(details, list):
        details = details[0] if details else None
    if not isinstance(details, dict) or not details.get("spec_verify_ct"):
        return None
    return Totals(
        rounds=int(details["spec_verify_ct"]),
        proposed=_either(details, "spec_num_proposed_drafts", "spec_draft_token_num"),
        accepted=_either(details, "spec_num_correct_drafts", "spec_accept_token_num"),
        histogram=tuple(details.get("spec_correct_drafts_histogram") or ()),
    )


def _either(details: Mapping[str, Any], name: str, older: str) -> int:
    return int(details.get(name) or details.get(older) or 0)


def _read_chat(seen: Seen, content: Sequence[Mapping[str, Any]]) -> None:
    for entry in content:
        seen.chosen.append(float(entry["logprob"]))
        if (own := _token(entry)) is not None:
            seen.named.append(own)
        seen.rows.append(_row([(_token(each), each["logprob"]) for each in entry.get("top_logprobs") or ()]))


def _read_completion(seen: Seen, logprobs: Mapping[str, Any]) -> None:
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    for token, value, top in zip(tokens, values, logprobs.get("top_logprobs") or (), strict=True):
        seen.chosen.append(float(value))
        if (own := _named(token)) is not None:
            seen.named.append(own)
        seen.rows.append(_row([(_named(key), logprob) for key, logprob in (top or {}).items()]))


def _token(entry: Mapping[str, Any]) -> int | None:
    own = entry.get("id")  # llama.cpp
    return own if isinstance(own, int) else _named(str(entry.get("token", "")))


def _named(token: str) -> int | None:
    digits = token.removeprefix(TOKEN)
    return int(digits) if token.startswith(TOKEN) and digits.isdigit() else None


def _row(pairs: Sequence[tuple[int | None, float]]) -> tuple[list[int], list[float]] | None:
    """Ids by falling probability; None where one of them has no id."""
    named = [(token, float(value)) for token, value in pairs if token is not None]
    if len(named) < len(pairs) or not named:
        return None
    ordered = sorted(named, key=lambda pair: -pair[1])
    return [token for token, _ in ordered], [value for _, value in ordered]


def teacher(seen: Seen, positions: Sequence[int], top_k: int) -> TeacherRows:
    """The rows of those output positions, as far as they can be believed; none where they cannot.

    Engines have given 0.0 for every token under speculation, and rows without the token that was chosen though it was
    the likeliest. An answer with such a row teaches nothing.
    """
    nothing = TeacherRows(0, b"", b"", b"", b"")
    if len(seen.rows) != len(seen.output) or not _credible(seen):
        return nothing
    taken = [(at, row) for at in positions if at < len(seen.rows) and (row := seen.rows[at]) is not None]
    k = min((min(len(row[0]), top_k) for _, row in taken), default=0)
    if k < LEAST_K:
        return nothing
    log_probs = np.array([row[1][:k] for _, row in taken], dtype=np.float64)
    return TeacherRows(
        top_k=k,
        positions=int32([at for at, _ in taken]),
        ids=int32(np.array([row[0][:k] for _, row in taken])),
        log_probs=np.minimum(log_probs, 0.0).astype("<f2").tobytes(),
        tail_log_mass=_tail(log_probs).astype("<f4").tobytes(),
    )


def _tail(log_probs: Floats) -> Floats:
    """The log of the mass outside the K; minus infinity where the rounding of the K leaves none."""
    outside = 1.0 - np.exp(log_probs).sum(axis=1)
    with np.errstate(divide="ignore"):
        tail: Floats = np.log(np.clip(outside, 0.0, 1.0))
    return tail


def _credible(seen: Seen) -> bool:
    values = np.array(seen.chosen)
    if not np.isfinite(values).all() or (values > 1e-3).any():
        return False
    certain = values == 0.0
    return not (certain[1:] & certain[:-1] & np.array([row is None for row in seen.rows[1:]], dtype=bool)).any()
