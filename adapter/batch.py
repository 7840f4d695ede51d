"""Feedback records to training batches: only the tokens that matter, and the teacher rows in draft tokens.

A row at output position t is taught through the hidden state of the token before it, so a sequence ends one
token before its last trained position; of a long prompt only the end is kept.

Beside the logged rows, at the positions where the drafter was refused, stand those that were accepted: there
the emitted token itself is the row. Without them a student unlearns what its parent was right about, as a good
parent's rejections show it less and less of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter.loss import target_rows
from storage.records import FeedbackRecord


@dataclass(frozen=True)
class Example:
    """One record to learn from."""

    tokens: Tensor  # int64 [n], target ids: the end of the prompt, and the output as far as it is needed
    at: Tensor  # int64 [R]: the indices whose hidden states are taught
    ids: Tensor  # int64 [R, K]: draft ids of the target's top K; -1 outside the draft vocabulary
    log_p: Tensor  # fp32 [R, K + 1]: the target's log-probabilities, the bucket last
    weight: Tensor  # fp32 [R]: 1 for a logged row


@dataclass(frozen=True)
class Batch:
    """Several examples, padded on the right; the rows of all of them behind one another."""

    tokens: Tensor  # int64 [B, n]
    at: Tensor  # int64 [R]: indices into the flattened [B * n]
    ids: Tensor  # int64 [R, K]
    log_p: Tensor  # fp32 [R, K + 1]
    weight: Tensor  # fp32 [R]


def example(
    record: FeedbackRecord, target_to_draft: Tensor, max_context: int, accepted_weight: float = 0.0
) -> Example | None:
    """The record's rows and the tokens before them, on the CPU; None where it has no rows.

    At most `max_context` tokens of the prompt are kept, and at least one: a row at output index 0 is taught
    through the prompt's last token.
    """
    refused, ids, log_p = _logged(record, target_to_draft)
    accepted = _accepted(record) if accepted_weight > 0 and record.greedy else refused[:0]
    positions = np.concatenate([refused, accepted])
    if not len(positions):
        return None
    emitted, emitted_log_p = _emitted(record.output[accepted], target_to_draft)
    k = max(ids.shape[1], 1)
    prompt = record.prompt[-max(1, max_context) :]
    return Example(
        tokens=torch.from_numpy(np.concatenate([prompt, record.output[: positions.max()]]).astype(np.int64)),
        at=torch.from_numpy(positions.astype(np.int64)) + len(prompt) - 1,
        ids=torch.cat([_widened(ids, k, -1), _widened(emitted, k, -1)]),
        log_p=torch.cat([_widened(rows, k + 1, -torch.inf) for rows in (log_p, emitted_log_p)]),
        weight=torch.tensor([1.0] * len(refused) + [accepted_weight] * len(accepted)),
    )


def _logged(record: FeedbackRecord, target_to_draft: Tensor) -> tuple[npt.NDArray[np.int32], Tensor, Tensor]:
    """The teacher rows: (output positions [R], draft ids [R, K], log p [R, K + 1])."""
    positions, ids, log_probs, tail = record.teacher.arrays()
    draft_ids = target_to_draft[torch.from_numpy(ids.astype(np.int64))]
    log_p = target_rows(torch.from_numpy(log_probs), torch.from_numpy(tail.copy()), draft_ids)
    return positions, draft_ids, log_p


def _accepted(record: FeedbackRecord) -> npt.NDArray[np.int32]:
    """The output positions of accepted tokens that have no row of their own.

    Of greedy requests only: there an accepted token is the target's whole choice. A sampled one that was
    accepted is drawn from min(p, q), so it would teach the drafter its own mistakes.
    """
    spans = [np.arange(r.start, r.start + r.accepted, dtype=np.int32) for r in record.rounds]
    return np.setdiff1d(np.concatenate([*spans, np.array([], dtype=np.int32)]), record.teacher.arrays()[0])


def _emitted(tokens: npt.NDArray[np.int32], target_to_draft: Tensor) -> tuple[Tensor, Tensor]:
    """(draft ids [A, 1], log p [A, 2]) of rows whose whole mass is on the emitted token."""
    ids = target_to_draft[torch.from_numpy(tokens.astype(np.int64))][:, None]
    return ids, target_rows(torch.zeros(len(tokens), 1), torch.full((len(tokens),), -torch.inf), ids)


def batches(examples: Sequence[Example], batch_tokens: int, generator: torch.Generator) -> Iterator[Batch]:
    """One pass in random order; lengths in a batch are close, its padded size about `batch_tokens`."""
    jitter = 0.9 + 0.2 * torch.rand(len(examples), generator=generator)
    lengths = torch.tensor([len(e.tokens) for e in examples])
    groups: list[list[Example]] = [[]]
    for i in (lengths * jitter).argsort().tolist():
        widest = max([len(examples[i].tokens), *(len(e.tokens) for e in groups[-1])])
        if groups[-1] and widest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(examples[i])
    for i in torch.randperm(len(groups), generator=generator).tolist():
        yield collate(groups[i])


def collate(examples: Sequence[Example]) -> Batch:
    """Pad tokens with 0 (causal attention never looks to the right) and rows with absent ids."""
    width, k = max(len(e.tokens) for e in examples), max(e.ids.shape[1] for e in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.int64)
    for i, e in enumerate(examples):
        tokens[i, : len(e.tokens)] = e.tokens
    return Batch(
        tokens=tokens,
        at=torch.cat([e.at + i * width for i, e in enumerate(examples)]),
        ids=torch.cat([_widened(e.ids, k, -1) for e in examples]),
        log_p=torch.cat([_widened(e.log_p, k + 1, -torch.inf) for e in examples]),
        weight=torch.cat([e.weight for e in examples]),
    )


def _widened(rows: Tensor, width: int, fill: float) -> Tensor:
    """Rows [R, w] to [R, width], filled before the last column of log-probabilities, after the last id."""
    gap = torch.full((len(rows), width - rows.shape[1]), fill, dtype=rows.dtype)
    if rows.is_floating_point():
        return torch.cat([rows[:, :-1], gap, rows[:, -1:]], dim=-1)
    return torch.cat([rows, gap], dim=-1)
