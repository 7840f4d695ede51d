"""The decision on one round: what each row keeps of its proposal, what the target adds, what the adapter learns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.acceptance import distribution, draw, matching_prefix, verify_chain
from adapter.drafters.protocol import Proposal
from adapter.teacher import top_rows
from service.engine.generation import Row, TeacherRow


@dataclass(frozen=True)
class Outcome:
    """What a round did for one row."""

    proposed: int
    accepted: int
    tokens: list[int]  # the accepted prefix and the next token
    rejected_token: int  # -1 where nothing was rejected
    rejected_q: float
    teacher: TeacherRow | None


def accept(rows: list[Row], lengths: list[int], proposal: Proposal, logits: Tensor, top_k: int) -> list[Outcome]:
    """Decide on every row. Proposals past a row's own draft length are padding, and are not looked at."""
    choices = logits.argmax(-1)
    matched = matching_prefix(proposal.tokens, choices[:, :-1]).tolist()
    proposed = [tokens[:k] for tokens, k in zip(proposal.tokens.tolist(), lengths, strict=True)]
    decided = []
    for i, row in enumerate(rows):
        if row.generation.policy.greedy:
            accepted = min(matched[i], lengths[i])
            decided.append((accepted, int(choices[i, accepted])))
        else:
            decided.append(_accept_sampled(row, proposed[i], proposal.q[i], logits[i]))
    teachers = _teacher_rows(rows, lengths, decided, logits, top_k)
    return [_outcome(proposed[i], proposal.q[i], *decided[i], teachers.get(i)) for i in range(len(rows))]


def _accept_sampled(row: Row, proposed: list[int], q: Tensor | None, logits: Tensor) -> tuple[int, int]:
    p = distribution(logits[: len(proposed) + 1], row.generation.policy).cpu()  # where the row's generator is
    if not proposed:
        return 0, draw(p[0], row.generator)
    assert q is not None, "a sampled row's proposal carries the q that it was drawn from"
    return verify_chain(p, q, proposed, row.generator)


def _outcome(proposed: list[int], q: Tensor | None, accepted: int, token: int, teacher: TeacherRow | None) -> Outcome:
    rejected = proposed[accepted] if accepted < len(proposed) else -1
    rejected_q = float(q[accepted, rejected]) if rejected >= 0 and q is not None else float(rejected >= 0)
    return Outcome(len(proposed), accepted, [*proposed[:accepted], token], rejected, rejected_q, teacher)


def _teacher_rows(
    rows: list[Row], lengths: list[int], decided: list[tuple[int, int]], logits: Tensor, top_k: int
) -> dict[int, TeacherRow]:
    """The target's top K at each row's rejection position, by row: one gather for the whole batch."""
    refused = [i for i, (a, _) in enumerate(decided) if a < lengths[i] and rows[i].generation.train]
    if not refused:
        return {}
    at = torch.tensor([decided[i][0] for i in refused], device=logits.device)
    ids, log_probs, tail = top_rows(logits[torch.tensor(refused, device=logits.device), at], top_k)
    return {
        i: TeacherRow(len(rows[i].generation.output_ids) + decided[i][0], ids[j], log_probs[j], float(tail[j]))
        for j, i in enumerate(refused)
    }
