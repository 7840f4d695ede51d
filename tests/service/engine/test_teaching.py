"""Rows are cut together, and each still reaches its own request."""

import numpy as np
import pytest
import torch
from torch import Tensor

from adapter.policy import Policy
from adapter.teacher import top_rows
from service.engine.generation import Generation
from service.engine.teaching import HELD, Teaching

VOCABULARY = 300


def request(name: str) -> Generation:
    return Generation(name, [1], Policy(), 8, listener=lambda delta: None)


def rows(count: int) -> Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count)) * 4


@pytest.mark.parametrize("count", [1, 5, HELD])
def test_rows_cut_together_are_those_cut_one_by_one(count: int) -> None:
    teaching, logits, generations = Teaching(top_k=6), rows(count), [request("a"), request("b")]
    for i in range(count):
        teaching.hold(generations[i % 2], i, logits[i])
    teaching.cut()
    found = {row.position: row for generation in generations for row in generation.teacher}
    assert sorted(found) == list(range(count))
    for i in range(count):
        ids, log_probs, tail = top_rows(logits[i : i + 1], 6)
        assert found[i].ids.tolist() == ids[0].tolist()
        np.testing.assert_allclose(found[i].log_probs, log_probs[0], rtol=2e-3)
        assert found[i].tail_log_mass == pytest.approx(float(tail[0]), abs=1e-4)
    assert all(row.position % 2 == 0 for row in generations[0].teacher)


def test_a_full_hand_is_cut_at_once_and_nothing_twice() -> None:
    teaching, generation, logits = Teaching(top_k=4), request("a"), rows(HELD)
    for i in range(HELD):
        teaching.hold(generation, i, logits[i])
    assert len(generation.teacher) == HELD
    teaching.cut()
    assert [row.position for row in generation.teacher] == list(range(HELD))
