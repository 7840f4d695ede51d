"""A round's figures and tokens into a request's output: where the request ends, and what its client is told."""

from collections.abc import Sequence

from service.engine.accept import Outcome
from service.engine.generation import Delta, Row, TokenLogprobs
from service.engine.rounds import RoundResult
from service.engine.teaching import Teaching
from storage.records import Round


def commit(row: Row, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], eos_ids: frozenset[int]) -> Delta:
    """Append `tokens` until the request ends, and only those count; sets its finish reason where it does."""
    generation, text, kept = row.generation, "", []
    for token in tokens:
        kept.append(token)
        generation.output_ids.append(token)
        row.sequence.append(token)
        if token not in generation.stop_token_ids:  # such a token ends the text, and is none of it
            text += row.text.push(token)
        generation.finish_reason = _finish_reason(row, token, eos_ids)
        if generation.finish_reason:
            text += row.text.flush()
            break
    row.sampler.commit(kept)
    return Delta(text, tuple(kept), logprobs=tuple(logprobs[: len(kept)]))


def _finish_reason(row: Row, token: int, eos_ids: frozenset[int]) -> str | None:
    generation = row.generation
    ends = token in eos_ids and not generation.ignore_eos
    if ends or token in generation.stop_token_ids or row.text.stopped:
        return "stop"
    return "length" if row.remaining == 0 else None


def note(row: Row, outcome: Outcome, result: RoundResult, version: int, teaching: Teaching) -> None:
    """Write down a round with a proposal, before its tokens are committed."""
    generation = row.generation
    if outcome.taught is not None:
        teaching.hold(generation, len(generation.output_ids) + outcome.accepted, outcome.taught, outcome.refusal)
    if not outcome.proposed:
        return
    generation.rounds.append(
        Round(
            start=len(generation.output_ids),
            version=version,
            proposed=outcome.proposed,
            accepted=outcome.accepted,
            rejected_token=outcome.rejected_token,
            rejected_q=outcome.rejected_q,
            draft_ms=round(result.draft_ms, 3),
            verify_ms=round(result.verify_ms, 3),
        )
    )
