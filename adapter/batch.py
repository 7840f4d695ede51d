"""Feedback records to training batches: only the tokens that matter, and the teacher rows in draft tokens.

A row at output position t is taught through the hidden state of the token before it, so a sequence ends one
token before its last trained position; of a long prompt only the end is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class Batch:
    """Several examples, padded on the right; the rows of all of them behind one another."""

    tokens: Tensor  # int64 [B, n]
    at: Tensor  # int64 [R]: indices into the flattened [B * n]
    ids: Tensor  # int64 [R, K]
    log_p: Tensor  # fp32 [R, K + 1]


def example(record: FeedbackRecord, target_to_draft: Tensor, max_context: int) -> Example | None:
    """The record's rows and the tokens before them, on the CPU; None where it has no rows.

    At most `max_context` tokens of the prompt are kept, and at least one: a row at output index 0 is taught
    through the prompt's last token.
    """
    positions, ids, log_probs, tail = record.teacher.arrays()
    if not len(positions):
        return None
    prompt = record.prompt[-max(1, max_context) :]
    tokens = np.concatenate([prompt, record.output[: positions[-1]]]).astype(np.int64)
    at = torch.from_numpy(positions.astype(np.int64)) + len(prompt) - 1
    draft_ids = target_to_draft[torch.from_numpy(ids.astype(np.int64))]
    log_p = target_rows(torch.from_numpy(log_probs), torch.from_numpy(tail.copy()), draft_ids)
    return Example(torch.from_numpy(tokens), at, draft_ids, log_p)


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
    )


def _widened(rows: Tensor, width: int, fill: float) -> Tensor:
    """Rows [R, w] to [R, width], filled before the last column of log-probabilities, after the last id."""
    gap = torch.full((len(rows), width - rows.shape[1]), fill, dtype=rows.dtype)
    if rows.is_floating_point():
        return torch.cat([rows[:, :-1], gap, rows[:, -1:]], dim=-1)
    return torch.cat([rows, gap], dim=-1)
