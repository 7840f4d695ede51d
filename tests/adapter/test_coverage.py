"""How much of the target's mass and of its tokens can be proposed."""

import msgspec
import numpy as np
import pytest
import torch

from adapter.coverage import Coverage, coverage
from storage.records import FeedbackRecord, TeacherRows, int32
from tests.storage.rows import make_record

TO_DRAFT = torch.tensor([0, -1, 1, -1, 2])  # of five tokens, 0, 2 and 4 can be proposed


def recorded(ids: list[list[int]], p: list[list[float]], output: list[int]) -> FeedbackRecord:
    rows = TeacherRows(
        top_k=2,
        positions=int32(list(range(len(ids)))),
        ids=np.array(ids, dtype="<i4").tobytes(),
        log_probs=np.log(np.array(p)).astype("<f2").tobytes(),
        tail_log_mass=np.full(len(ids), -np.inf, dtype="<f4").tobytes(),
    )
    return msgspec.structs.replace(make_record("a"), teacher=rows, output_ids=int32(output))


def test_mass_and_tokens_inside_the_draft_vocabulary_are_counted() -> None:
    record = recorded([[0, 1], [4, 2]], [[0.75, 0.25], [0.5, 0.5]], output=[0, 1, 3, 2])
    found = coverage([record], TO_DRAFT)
    assert found.mass == pytest.approx((0.75 + 1.0) / 2, abs=1e-3)
    assert found.tokens == 0.5


def test_mass_outside_the_top_k_counts_on_neither_side() -> None:
    record = recorded([[0, 1]], [[0.25, 0.25]], output=[0])
    assert coverage([record], TO_DRAFT).mass == pytest.approx(0.5, abs=1e-3)


def test_several_records_are_added_up_by_position_and_not_averaged() -> None:
    one, three = recorded([], [], output=[0]), recorded([], [], output=[1, 1, 1])
    assert coverage([one, three], TO_DRAFT).tokens == 0.25


def test_without_rows_there_is_no_mass_and_without_records_nothing() -> None:
    assert coverage([make_record("a", tokens=3)], torch.arange(5)) == Coverage(None, 1.0)
    assert coverage([], TO_DRAFT) == Coverage(None, None)
