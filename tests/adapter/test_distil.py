"""Distillation on a tiny model: it learns, it can be repeated, and it fails without harm."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from adapter.batch import example
from adapter.distil import DistilConfig, Distilled, Lesson, TrainingFailed, distil, is_set_aside
from adapter.drafters.causal_lm import CausalLM
from adapter.loss import LOSSES, LossName
from adapter.passes import mean_loss, rate
from adapter.replay import matches
from adapter.target import Target
from storage.config import SettingError, read
from storage.records import FeedbackRecord, TeacherRows
from tests.adapter.feedback import refusals, served

QUICK = DistilConfig(epochs=12, learning_rate=3e-3, batch_tokens=256, max_context=64)


@pytest.fixture(scope="module")
def parent(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 2))


@pytest.fixture(scope="module")
def traffic(parent: CausalLM, answered: list[FeedbackRecord]) -> list[FeedbackRecord]:
    return [served(parent, answer) for answer in answered]


def taught(parent: CausalLM, records: list[FeedbackRecord], config: DistilConfig = QUICK) -> Distilled:
    return distil(parent, Lesson(records), config)


def agreement(drafter: CausalLM, records: list[FeedbackRecord]) -> float:
    return float(sum(matches(drafter, r).sum() for r in records) / sum(len(r.output) for r in records))


def test_the_student_agrees_with_the_target_more_often_than_its_parent(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    made = taught(parent, traffic)
    report = made.report
    assert agreement(made.student, traffic) > agreement(parent, traffic) + 0.1
    assert report.last_loss < report.first_loss
    assert (report.outcome, report.records) == ("trained", len(traffic))
    assert report.positions == sum(len(record.output) - 1 for record in traffic)
    assert report.passes == QUICK.epochs


def test_the_same_inputs_give_the_same_weights_bit_for_bit(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    torch.manual_seed(1)
    first = taught(parent, traffic).student
    torch.manual_seed(2)
    second = taught(parent, traffic).student
    for name, tensor in first.own_tensors().items():
        assert torch.equal(tensor, second.own_tensors()[name]), name


def test_another_seed_gives_other_weights(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    first, second = (taught(parent, traffic, replace(QUICK, seed=seed)).student for seed in (0, 1))
    assert not torch.equal(first.head.weight, second.head.weight)


def test_the_parent_the_embedding_and_the_vocabulary_map_stay_as_they_were(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
    student = taught(parent, traffic).student
    for name, tensor in parent.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert student.embedding.data_ptr() == parent.embedding.data_ptr()
    assert torch.equal(student.draft_to_target, parent.draft_to_target)
    assert torch.equal(student.target_to_draft, parent.target_to_draft)


def test_as_osd_is_published_only_refused_positions_count(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    report = taught(parent, traffic, replace(QUICK, epochs=1, positions="rejected")).report
    assert report.positions == sum(r.accepted < r.proposed for record in traffic for r in record.rounds)


def test_a_student_taught_by_refusals_alone_unlearns_more_of_what_was_right(
    parent: CausalLM, answered: list[FeedbackRecord]
) -> None:
    """From a good parent, whose refusals say nothing about what it knows already."""
    good = taught(parent, [served(parent, answer) for answer in answered], replace(QUICK, epochs=20)).student
    traffic = [served(good, answer) for answer in answered]
    right = [matches(good, record) for record in traffic]

    def kept(weight: float) -> float:
        student = taught(good, traffic, replace(QUICK, epochs=2, learning_rate=1e-2, accepted_weight=weight)).student
        still = [matches(student, record)[was].mean() for record, was in zip(traffic, right, strict=True)]
        return float(sum(still) / len(still))

    assert kept(0.3) > kept(0.0) + 0.02


def test_only_the_logged_positions_are_learnt_from(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    """With refused positions alone, tokens after the last row reach no weight of the student."""
    record = refusals(answered[0], [1, 3])
    changed = record.output.copy()
    changed[4:] = 7
    other = msgspec.structs.replace(record, output_ids=changed.tobytes())
    config = DistilConfig(epochs=2, positions="rejected")
    first, second = (taught(parent, [r], config).student for r in (record, other))
    assert torch.equal(first.head.weight, second.head.weight)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_every_loss_the_student_learns(parent: CausalLM, traffic: list[FeedbackRecord], loss: LossName) -> None:
    made = taught(parent, traffic, replace(QUICK, loss=loss))
    assert agreement(made.student, traffic) > agreement(parent, traffic) + 0.05
    assert made.report.last_loss < made.report.first_loss


@pytest.mark.parametrize(("name", "value"), [("LOSS", "kl"), ("POSITIONS", "all")])
def test_a_loss_or_positions_that_there_are_not_are_refused_with_those_there_are(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=rf"REDRAFT_{name}='{value}'.*('lk_hybrid'|'verified')"):
        read(DistilConfig, {f"REDRAFT_{name}": value})


def test_packing_changes_which_sequences_share_a_step_and_nothing_else(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    """With all of them in one step it is the same step."""
    config = replace(QUICK, epochs=3, batch_tokens=100_000)
    alone, together = (taught(parent, traffic, replace(config, packing=packing)) for packing in (False, True))
    for name, tensor in alone.student.own_tensors().items():
        torch.testing.assert_close(tensor, together.student.own_tensors()[name], rtol=1e-3, atol=1e-4)


def some_of(records: list[FeedbackRecord], share: float, aside: bool) -> list[FeedbackRecord]:
    return [r for r in records if is_set_aside(r.request_id, share) is aside]


def test_what_is_set_aside_is_not_trained_on(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    share = 0.4
    seen, unseen = (some_of(traffic, share, aside=aside) for aside in (False, True))
    assert seen
    assert unseen
    config = replace(QUICK, epochs=1, stopping_share=share)
    both = taught(parent, traffic, config)
    assert both.report.positions == sum(len(r.output) - 1 for r in seen)
    without = taught(parent, seen, config)
    assert torch.equal(both.student.head.weight, without.student.head.weight)


def test_a_run_stops_after_the_best_pass_and_keeps_its_weights(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    config = replace(QUICK, epochs=40, learning_rate=3e-2, stopping_share=0.3, patience=2)
    made = taught(parent, traffic, config)
    losses, passes = made.report.set_aside_losses, made.report.passes
    assert passes < 40
    assert len(losses) == passes + 1
    best = losses.index(min(losses[1:]), 1)
    assert passes - best == 2
    stopped = [example(r, parent.target_to_draft, config.max_context) for r in some_of(traffic, 0.3, aside=True)]
    assert mean_loss(made.student, [e for e in stopped if e], config.loss) == pytest.approx(min(losses[1:]))


def test_the_learning_rate_follows_how_new_the_window_is(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    """Replayed: what the parent knows. A window like it is learnt from slowly, a new one quickly, within bounds."""
    known = [served(parent, a) for a in answered[:8]]
    good = taught(parent, known, replace(QUICK, epochs=30)).student
    config = replace(QUICK, epochs=1, novelty_range=2.0, warm_up=0.0)
    new = distil(good, Lesson([served(good, a) for a in answered[8:]], replay=known), config).report
    alike = distil(good, Lesson(known, replay=known), config).report
    assert new.novelty is not None
    assert new.novelty > 1.5
    assert alike.novelty == pytest.approx(1.0)
    off = distil(good, Lesson(known, replay=known), replace(config, novelty_range=1.0)).report
    assert off.novelty is None


def test_the_learning_rate_changes_by_the_range_at_most(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    known = [served(parent, a) for a in answered[:8]]
    good = taught(parent, known, replace(QUICK, epochs=30)).student
    lesson = Lesson([served(good, a) for a in answered[8:]], replay=known)
    config = replace(QUICK, epochs=1, novelty_range=1.25)
    scaled = distil(good, lesson, config)
    by_hand = distil(good, lesson, replace(config, novelty_range=1.0, learning_rate=1.25 * config.learning_rate))
    assert torch.equal(scaled.student.head.weight, by_hand.student.head.weight)


def test_replayed_records_are_trained_on_before_and_counted_apart(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    made = distil(parent, Lesson(traffic[8:], replay=traffic[:8]), QUICK)
    assert (made.report.records, made.report.replayed) == (16, 8)
    assert torch.equal(made.student.head.weight, taught(parent, traffic).student.head.weight)


def test_the_report_says_how_much_the_draft_vocabulary_covers(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    report = taught(parent, traffic, replace(QUICK, epochs=1)).report
    emitted = [int(token) for record in traffic for token in record.output]
    assert report.tokens_covered == pytest.approx(sum(token % 2 == 0 for token in emitted) / len(emitted))
    assert report.mass_covered is not None
    assert 0.2 < report.mass_covered < 0.8


def test_moments_that_are_carried_change_the_next_run_and_are_part_of_what_repeats_it(
    parent: CausalLM, traffic: list[FeedbackRecord]
) -> None:
    first = taught(parent, traffic[:8])
    fresh = distil(first.student, Lesson(traffic[8:]), QUICK)
    carried, again = (distil(first.student, Lesson(traffic[8:], moments=first.moments), QUICK) for _ in range(2))
    assert not torch.equal(fresh.student.head.weight, carried.student.head.weight)
    assert torch.equal(again.student.head.weight, carried.student.head.weight)
    assert carried.moments.step == first.moments.step + carried.report.steps


def test_nothing_to_learn_from_is_a_failure_that_says_so(parent: CausalLM, answered: list[FeedbackRecord]) -> None:
    bare = msgspec.structs.replace(answered[0], teacher=TeacherRows(0, b"", b"", b"", b""))
    with pytest.raises(TrainingFailed, match="no record has rejected positions to learn from") as failure:
        taught(parent, [bare], replace(QUICK, positions="rejected"))
    assert failure.value.report.outcome == "failed"
    assert failure.value.report.steps == 0


def test_a_run_that_diverges_fails_and_reports_finite_numbers(parent: CausalLM, traffic: list[FeedbackRecord]) -> None:
    with pytest.raises(TrainingFailed, match="not finite") as failure:
        taught(parent, traffic, DistilConfig(epochs=4, learning_rate=1e30, warm_up=0.0))
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
        distil(parent, Lesson(traffic), QUICK, should_stop)
    assert calls == 3


def test_the_learning_rate_rises_and_then_falls_to_nothing() -> None:
    rates = [rate(step, 100, warm_up=0.1) for step in range(100)]
    assert rates.index(max(rates)) in (9, 10)
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_one_single_step_is_taken_at_the_full_rate() -> None:
    assert rate(0, 1, warm_up=0.1) == 1.0
