"""Distillation on a tiny model: it learns, it can be repeated, and it fails without harm."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from adapter.distil import DistilConfig, TrainingFailed, distil, rate
from adapter.drafters.causal_lm import CausalLM
from adapter.replay import matches
from adapter.target import Target
from storage.records import FeedbackRecord, TeacherRows
from tests.adapter.feedback import kept_rows, served

QUICK = DistilConfig(epochs=12, learning_rate=3e-3, batch_tokens=256, max_context=64)


@pytest.fixture(scope="module")
def parent(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 2))


@pytest.fixture(scope="module")
def traffic(parent: CausalLM, answered: list[FeedbackRecord]) -> list[FeedbackRecord]:
    return [served(parent, answer) for answer in answered]


def agreement(drafter: CausalLM, records: list[FeedbackRecord]) -> float:
    return float(sum(matches(drafter, r).sum() for r in records) / sum(len(r.output) for r in records))


def test_the_student_agrees_with_the_target_more_often_than_its_parent(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    student, report = distil(parent, traffic, QUICK)
    assert agreement(student, traffic) > agreement(parent, traffic) + 0.1
    assert report.last_loss < report.first_loss
    assert (report.outcome, report.records) == ("trained", len(traffic))
    refused = sum(r.accepted < r.proposed for record in traffic for r in record.rounds)
    assert report.positions == refused + sum(r.accepted for record in traffic for r in record.rounds)


def test_the_same_inputs_give_the_same_weights_bit_for_bit(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    torch.manual_seed(1)
    first, _ = distil(parent, traffic, QUICK)
    torch.manual_seed(2)
    second, _ = distil(parent, traffic, QUICK)
    for name, tensor in first.own_tensors().items():
        assert torch.equal(tensor, second.own_tensors()[name]), name


def test_another_seed_gives_other_weights(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    first, _ = distil(parent, traffic, QUICK)
    second, _ = distil(parent, traffic, replace(QUICK, seed=1))
    assert not torch.equal(first.head.weight, second.head.weight)


def test_the_parent_the_embedding_and_the_vocabulary_map_stay_as_they_were(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
    student, _ = distil(parent, traffic, QUICK)
    for name, tensor in parent.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert student.embedding.data_ptr() == parent.embedding.data_ptr()
    assert torch.equal(student.draft_to_target, parent.draft_to_target)
    assert torch.equal(student.target_to_draft, parent.target_to_draft)


def test_with_no_weight_on_accepted_positions_only_refused_ones_count(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    _, report = distil(parent, traffic, replace(QUICK, epochs=1, accepted_weight=0.0))
    assert report.positions == sum(r.accepted < r.proposed for record in traffic for r in record.rounds)


def test_a_student_taught_by_refusals_alone_unlearns_more_of_what_was_right(
    parent: CausalLM, answered: list[FeedbackRecord]
) -> None:
    """From a good parent, whose refusals say nothing about what it knows already."""
    good, _ = distil(parent, [served(parent, answer) for answer in answered], replace(QUICK, epochs=20))
    traffic = [served(good, answer) for answer in answered]
    right = [matches(good, record) for record in traffic]

    def kept(weight: float) -> float:
        student, _ = distil(good, traffic, replace(QUICK, epochs=2, learning_rate=1e-2, accepted_weight=weight))
        still = [matches(student, record)[was].mean() for record, was in zip(traffic, right, strict=True)]
        return float(sum(still) / len(still))

    assert kept(0.3) > kept(0.0) + 0.02


def test_only_the_logged_positions_are_learnt_from(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    """Tokens after the last row reach no weight."""
    record = msgspec.structs.replace(answered[0], teacher=kept_rows(answered[0].teacher, [1, 3]))
    changed = record.output.copy()
    changed[4:] = 7
    other = msgspec.structs.replace(record, output_ids=changed.tobytes())
    first, second = (distil(parent, [r], DistilConfig(epochs=2))[0] for r in (record, other))
    assert torch.equal(first.head.weight, second.head.weight)


def test_nothing_to_learn_from_is_a_failure_that_says_so(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    bare = msgspec.structs.replace(answered[0], teacher=TeacherRows(0, b"", b"", b"", b""))
    with pytest.raises(TrainingFailed, match="no record has teacher rows") as failure:
        distil(parent, [bare], QUICK)
    assert failure.value.report.outcome == "failed"
    assert failure.value.report.steps == 0


def test_a_run_that_diverges_fails_and_reports_finite_numbers(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    with pytest.raises(TrainingFailed, match="not finite") as failure:
        distil(parent, traffic, DistilConfig(epochs=4, learning_rate=1e30, warm_up=0.0))
    report = failure.value.report
    assert report.steps > 0
    assert math.isfinite(report.first_loss)
    assert math.isfinite(report.last_loss)
    assert bool(torch.isfinite(parent.head.weight).all())


def test_a_lost_lease_ends_the_run_before_the_next_step(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    class LeaseGone(Exception):
        pass

    calls = 0

    def should_stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LeaseGone

    with pytest.raises(LeaseGone):
        distil(parent, traffic, QUICK, should_stop)
    assert calls == 3


def test_the_learning_rate_rises_and_then_falls_to_nothing() -> None:
    rates = [rate(step, 100, warm_up=0.1) for step in range(100)]
    assert rates.index(max(rates)) in (9, 10)
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_one_single_step_is_taken_at_the_full_rate() -> None:
    assert rate(0, 1, warm_up=0.1) == 1.0
