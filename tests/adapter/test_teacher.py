"""Compressing the target's distribution to its top K and a tail."""

import numpy as np
import pytest
import torch

from adapter.teacher import CHUNK, largest, teacher_rows


def test_the_top_k_and_the_tail_are_the_targets_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    positions, ids, log_probs, tail = teacher_rows([2, 5, 6], logits, top_k=8).arrays()
    expected, named_ids = logits.softmax(-1), torch.tensor(ids.tolist())
    assert positions.tolist() == [2, 5, 6]
    assert ids[:, 0].tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(np.exp(log_probs), expected.gather(-1, named_ids), rtol=5e-3)
    named = expected.gather(-1, named_ids).sum(-1)
    np.testing.assert_allclose(np.exp(tail), 1 - named, rtol=1e-4)


def test_a_tail_far_below_float32s_step_at_one_is_not_lost() -> None:
    logits = torch.tensor([[0.0, -30.0, -31.0]])
    tail = teacher_rows([0], logits, top_k=1).arrays()[3]
    assert abs(float(tail[0]) - float(torch.tensor([-30.0, -31.0]).logsumexp(0))) < 1e-4


def test_nothing_is_outside_a_top_k_of_the_whole_vocabulary() -> None:
    rows = teacher_rows([0], torch.tensor([[1.0, 2.0]]), top_k=64)
    assert rows.top_k == 2
    assert rows.arrays()[3].tolist() == [-np.inf]


@pytest.mark.parametrize("size", [40 * CHUNK, 40 * CHUNK - 1, 9 * CHUNK, 7 * CHUNK], ids=str)
@pytest.mark.parametrize("step", [1e-4, 1.0], ids=["all different", "many the same"])
def test_the_largest_of_a_row_are_found_wherever_they_stand(size: int, step: float) -> None:
    values = (torch.randn(20, size, generator=torch.Generator().manual_seed(size)) / step).round() * step
    values[0, -8:] += 100.0  # all in one chunk
    found, ids = largest(values, 8)
    assert torch.equal(found, values.topk(8).values)
    assert torch.equal(values.gather(1, ids), found)
    assert all(len(set(row)) == 8 for row in ids.tolist()), "no token twice"
