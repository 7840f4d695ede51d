"""The decision on one round: what each row keeps of its proposal, what the target adds, what the adapter learns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapter.drafters.protocol import Proposal
from adapter.sampling import sampled_rows, verify
from adapter.teacher import top_rows
from service.engine.generation import Row, TeacherRow, TokenLogprobs

PLAIN_STRIDE = 8  # of plainly decoded positions above temperature 0, one in so many is logged


@dataclass(frozen=True)
class Outcome:
    """What a round did for one row."""

    proposed: int
    accepted: int
    tokens: list[int]  # the accepted prefix and the next token
    rejected_token: int  # -1 where nothing was rejected
    rejected_q: float
    teacher: TeacherRow | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # aligned with tokens; empty unless asked for


def accept(rows: list[Row], lengths: list[int], proposal: Proposal, logits: Tensor, top_k: int) -> list[Outcome]:
    """Decide on every row by the target's logits [B, k + 1, V].

    Proposals past a row's own draft length are padding, and are not looked at. The token after a prefill is a
    round without a proposal.
    """
    lengths = [min(k, proposal.tokens.shape[1]) for k in lengths]
    samplers = [row.sampler for row in rows]
    decided = verify(samplers, lengths, proposal.tokens, proposal.drawn, logits)
    proposed = [tokens[:k] for tokens, k in zip(proposal.tokens.tolist(), lengths, strict=True)]
    committed = [[*tokens[: d[0]], d[1]] for tokens, d in zip(proposed, decided, strict=True)]
    teachers = _teacher_rows(rows, lengths, decided, logits, top_k)
    logprobs = _logprobs(rows, committed, logits)
    q = {} if proposal.drawn is None else dict(zip(sampled_rows(samplers), proposal.drawn.taken.tolist(), strict=True))
    refused = [_refused(proposed[i], decided[i][0], q.get(i)) for i in range(len(rows))]
    return [
        Outcome(lengths[i], decided[i][0], committed[i], *refused[i], teachers.get(i), logprobs.get(i, []))
        for i in range(len(rows))
    ]


def _refused(proposed: list[int], accepted: int, q: list[float] | None) -> tuple[int, float]:
    """The token that was refused, -1 for none, and its q: 1.0 where it was not drawn but chosen."""
    if accepted == len(proposed):
        return -1, 0.0
    return proposed[accepted], 1.0 if q is None else q[accepted]


def _teacher_rows(
    rows: list[Row], lengths: list[int], decided: list[tuple[int, int]], logits: Tensor, top_k: int
) -> dict[int, TeacherRow]:
    """The target's top K where a row has something to teach, by row: one gather for the whole batch.

    That is its rejection position; and of a row above temperature 0 that is decoded plainly some positions, since
    there the emitted token alone does not tell the target's distribution.
    """
    taught = [i for i, row in enumerate(rows) if row.generation.train and _teaches(row, lengths[i], decided[i][0])]
    if not taught:
        return {}
    at = torch.tensor([decided[i][0] for i in taught], device=logits.device)
    ids, log_probs, tail = top_rows(logits[torch.tensor(taught, device=logits.device), at], top_k)
    return {
        i: TeacherRow(len(rows[i].generation.output_ids) + decided[i][0], ids[j], log_probs[j], float(tail[j]))
        for j, i in enumerate(taught)
    }


def _teaches(row: Row, proposed: int, accepted: int) -> bool:
    if proposed:
        return accepted < proposed
    return not row.sampler.policy.greedy and len(row.generation.output_ids) % PLAIN_STRIDE == 1


def _logprobs(rows: list[Row], committed: Sequence[Sequence[int]], logits: Tensor) -> dict[int, list[TokenLogprobs]]:
    """The target's log-probabilities of what the rows that asked commit, by row: one gather for the whole batch."""
    asked = {i: row.generation.logprobs for i, row in enumerate(rows) if row.generation.logprobs is not None}
    places = [(i, at, token) for i in asked for at, token in enumerate(committed[i])]
    if not places:
        return {}
    row, at, token = (torch.tensor(column, device=logits.device) for column in zip(*places, strict=True))
    log_probs = logits[row, at].float().log_softmax(-1)
    own = log_probs.gather(1, token[:, None])[:, 0].tolist()
    best = log_probs.topk(min(max(asked.values()), log_probs.shape[-1]), dim=-1)
    pairs = [list(zip(*both, strict=True)) for both in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    found: dict[int, list[TokenLogprobs]] = {i: [] for i in asked}
    for (i, _, chosen), logprob, top in zip(places, own, pairs, strict=True):
        found[i].append(TokenLogprobs(chosen, logprob, tuple(top[: asked[i]])))
    return found
