"""Feedback records to training batches: only the tokens that matter, and the teacher rows in draft tokens.

A row at output position t is taught through the hidden state of the token before it, so a sequence ends one
token before its last trained position; of a long prompt only the end is kept.

`rejected` positions are those where the drafter was refused, as OSD is published: the logged row there, and no other.
`verified` ones are all that were proposed up to there, and plainly decoded tokens: the logged row where there is one,
and for greedy requests elsewhere the emitted token itself. Without them a student unlearns what its parent was right
about, as a good parent's rejections show it less and less of that; and where the governor decodes plainly, they are
all that there is to learn from. What was drafted after a refusal is never looked at.

For drafters that are conditioned on the target's hidden states an example has those of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter.loss import target_rows
from storage.records import FeedbackRecord

Positions = Literal["rejected", "verified"]


@dataclass(frozen=True)
class Example:
    """One record to learn from."""

    tokens: Tensor  # int64 [n], target ids: the end of the prompt, and the output as far as it is needed
    at: Tensor  # int64 [R]: the index of the token before each row's, where the row is taught
    ids: Tensor  # int64 [R, K]: draft ids of the target's top K; -1 outside the draft vocabulary
    log_p: Tensor  # fp32 [R, K + 1]: the target's log-probabilities, the bucket last
    weight: Tensor  # fp32 [R]: 1 where the drafter was refused
    hidden: Tensor | None = None  # bf16 [n, F], the target's, of the tokens


@dataclass(frozen=True)
class Batch:
    """Several examples, padded on the right or packed into one row; the rows of all of them behind one another."""

    tokens: Tensor  # int64 [B, n]
    positions: Tensor | None  # int64 [1, n] of packed examples: each starts at 0, and sees no other
    at: Tensor  # int64 [R]: indices into the flattened [B * n]
    ids: Tensor  # int64 [R, K]
    log_p: Tensor  # fp32 [R, K + 1]
    weight: Tensor  # fp32 [R]
    before: Tensor  # int64 [R]: how many tokens of its example stand before each row's index
    hidden: Tensor | None  # bf16 [B, n, F]


def example(
    record: FeedbackRecord,
    target_to_draft: Tensor,
    max_context: int,
    positions: Positions = "verified",
    accepted_weight: float = 1.0,
    hidden: Tensor | None = None,
) -> Example | None:
    """The record's rows and the tokens before them, on the CPU; None where it has no rows.

    At most `max_context` tokens of the prompt are kept, and at least one: a row at output index 0 is taught
    through the prompt's last token. `accepted_weight` is that of a position that was not refused. `hidden` [m, F] are
    the target's states of the end of the prompt, of as many tokens as are kept, and of the output.
    """
    logged, ids, log_p = _logged(record, target_to_draft)
    others = _unlogged(record) if positions == "verified" and record.exact else logged[:0]
    emitted, emitted_log_p = _emitted(record.output[others], target_to_draft)
    at = np.concatenate([logged, others])
    refused = np.isin(at, _refused(record))
    weight = np.where(refused, 1.0, accepted_weight if positions == "verified" else 0.0)
    kept = np.flatnonzero(weight > 0)
    if not len(kept):
        return None
    k = max(ids.shape[1], 1)
    prompt = record.prompt[-max(1, max_context) :]
    tokens = torch.from_numpy(np.concatenate([prompt, record.output[: at[kept].max()]]).astype(np.int64))
    return Example(
        tokens=tokens,
        at=torch.from_numpy(at[kept].astype(np.int64)) + len(prompt) - 1,
        ids=torch.cat([_widened(ids, k, -1), _widened(emitted, k, -1)])[kept],
        log_p=torch.cat([_widened(rows, k + 1, -torch.inf) for rows in (log_p, emitted_log_p)])[kept],
        weight=torch.from_numpy(weight[kept]).float(),
        hidden=None if hidden is None else _of_tokens(hidden, tokens, len(prompt) + len(record.output)),
    )


def _of_tokens(hidden: Tensor, tokens: Tensor, expected: int) -> Tensor:
    """The states of an example's tokens, which are the first ones of those that were read."""
    if len(hidden) != expected:
        raise ValueError(f"hidden states of {len(hidden)} tokens for a text of {expected}: max_context is not the same")
    return hidden[: len(tokens)]


def _logged(record: FeedbackRecord, target_to_draft: Tensor) -> tuple[npt.NDArray[np.int32], Tensor, Tensor]:
    """The teacher rows: (output positions [R], draft ids [R, K], log p [R, K + 1])."""
    positions, ids, log_probs, tail = record.teacher.arrays()
    draft_ids = target_to_draft[torch.from_numpy(ids.astype(np.int64))]
    log_p = target_rows(torch.from_numpy(log_probs), torch.from_numpy(tail.copy()), draft_ids)
    return positions, draft_ids, log_p


def _refused(record: FeedbackRecord) -> list[int]:
    """The output positions at which a proposal was refused."""
    return [r.start + r.accepted for r in record.rounds if r.accepted < r.proposed]


def _unlogged(record: FeedbackRecord) -> npt.NDArray[np.int32]:
    """The output positions that have no row of their own, but the first: no drafter ever proposes there.

    Of greedy requests only: there each token is the target's whole choice. A sampled one that was accepted is
    drawn from min(p, q), so it would teach the drafter its own mistakes.
    """
    return np.setdiff1d(np.arange(1, len(record.output), dtype=np.int32), record.teacher.arrays()[0])


def _emitted(tokens: npt.NDArray[np.int32], target_to_draft: Tensor) -> tuple[Tensor, Tensor]:
    """(draft ids [A, 1], log p [A, 2]) of rows whose whole mass is on the emitted token."""
    ids = target_to_draft[torch.from_numpy(tokens.astype(np.int64))][:, None]
    return ids, target_rows(torch.zeros(len(tokens), 1), torch.full((len(tokens),), -torch.inf), ids)


def grouped(
    examples: Sequence[Example], batch_tokens: int, generator: torch.Generator, packing: bool = False
) -> list[list[Example]]:
    """One pass in random order, about `batch_tokens` a group. Those to be padded are put with others of like length."""
    return (_drawn if packing else _alike)(examples, batch_tokens, generator)


def collated(examples: Sequence[Example], packing: bool = False) -> Batch:
    """A group as the batch of one step."""
    return packed(examples) if packing else padded(examples)


def _alike(examples: Sequence[Example], batch_tokens: int, generator: torch.Generator) -> list[list[Example]]:
    """Groups of examples whose lengths are close, in random order; the padded size counts."""
    jitter = 0.9 + 0.2 * torch.rand(len(examples), generator=generator)
    lengths = torch.tensor([len(e.tokens) for e in examples])
    groups: list[list[Example]] = [[]]
    for i in (lengths * jitter).argsort().tolist():
        widest = max([len(examples[i].tokens), *(len(e.tokens) for e in groups[-1])])
        if groups[-1] and widest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(examples[i])
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def _drawn(examples: Sequence[Example], batch_tokens: int, generator: torch.Generator) -> list[list[Example]]:
    """Groups of examples as they are drawn at random, each filled up to the size."""
    groups: list[list[Example]] = [[]]
    size = 0
    for i in torch.randperm(len(examples), generator=generator).tolist():
        size += len(examples[i].tokens)
        if groups[-1] and size > batch_tokens:
            groups.append([])
            size = len(examples[i].tokens)
        groups[-1].append(examples[i])
    return groups


def padded(examples: Sequence[Example]) -> Batch:
    """A row an example, padded with token 0 on the right, where causal attention never looks."""
    width = max(len(e.tokens) for e in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.int64)
    for i, e in enumerate(examples):
        tokens[i, : len(e.tokens)] = e.tokens
    hidden = [e.hidden for e in examples if e.hidden is not None]
    states = torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True) if hidden else None
    return _batch(examples, tokens, None, [i * width for i in range(len(examples))], states)


def packed(examples: Sequence[Example]) -> Batch:
    """All examples in one row. transformers keeps them apart by their positions: each starts at 0 again."""
    lengths = [len(e.tokens) for e in examples]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    hidden = [e.hidden for e in examples if e.hidden is not None]
    states = torch.cat(hidden)[None] if hidden else None
    return _batch(examples, torch.cat([e.tokens for e in examples])[None], positions, starts, states)


def _batch(
    examples: Sequence[Example], tokens: Tensor, positions: Tensor | None, starts: list[int], hidden: Tensor | None
) -> Batch:
    """The rows of the examples, whose tokens begin at these indices of the flattened ones."""
    k = max(e.ids.shape[1] for e in examples)
    return Batch(
        tokens=tokens,
        positions=positions,
        at=torch.cat([e.at + start for e, start in zip(examples, starts, strict=True)]),
        ids=torch.cat([_widened(e.ids, k, -1) for e in examples]),
        log_p=torch.cat([_widened(e.log_p, k + 1, -torch.inf) for e in examples]),
        weight=torch.cat([e.weight for e in examples]),
        before=torch.cat([e.at for e in examples]),
        hidden=hidden,
    )


def _widened(rows: Tensor, width: int, fill: float) -> Tensor:
    """Rows [R, w] to [R, width], filled before the last column of log-probabilities, after the last id."""
    gap = torch.full((len(rows), width - rows.shape[1]), fill, dtype=rows.dtype)
    if rows.is_floating_point():
        return torch.cat([rows[:, :-1], gap, rows[:, -1:]], dim=-1)
    return torch.cat([rows, gap], dim=-1)
