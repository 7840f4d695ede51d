"""Re-scoring: the rows are those that serving would have logged, at every position, in bounded passes and time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from adapter.distil import DistilConfig, Lesson, distil
from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.replay import matches, overlaps
from adapter.rescore import Pace, RescoreConfig, Rescored, rescore, wanted
from adapter.taps import FINAL, Taps
from adapter.target import Target
from service.origin import Origin
from service.recording import record_of
from storage.config import SettingError, read
from storage.records import FeedbackRecord, TeacherRows
from storage.validation import validate
from tests.adapter.feedback import refusals, served
from tests.service.engine.oracle import GREEDY, ask, first_layers, random_prompt, running

SAMPLED = Policy(temperature=0.8)
NO_ROWS = TeacherRows(0, b"", b"", b"", b"")


@pytest.fixture(scope="module")
def logged(target: Target) -> list[FeedbackRecord]:
    """Greedy and sampled requests that the engine served with a drafter, as the engine logs them."""
    with running(target, first_layers(target, vocabulary=200), teacher_top_k=16) as engine:
        policies = [GREEDY, SAMPLED, Policy(temperature=0.0, presence_penalty=1.0)]
        clients = [
            ask(engine, random_prompt(target, n, 5 + n), max_tokens=20, policy=policies[n % 3], seed=n, ignore_eos=True)
            for n in range(12)
        ]
        for client in clients:
            client.wait()
    return [record_of(client.generation, Origin("target", "tokenizer", "demo")) for client in clients]


def by_id(found: Iterator[Rescored]) -> dict[str, Rescored]:
    return {rescored.record.record_id: rescored for rescored in found}


def agrees(ours: TeacherRows, theirs: TeacherRows) -> None:
    """The same tokens with the same probabilities, to the last digit that float16 keeps of a logarithm."""
    (at, ids, log_probs, tail), (their_at, their_ids, their_log_probs, their_tail) = ours.arrays(), theirs.arrays()
    assert at.tolist() == their_at.tolist()
    assert (ids == their_ids).mean() > 0.98  # two that are equally likely may change places
    np.testing.assert_allclose(log_probs, their_log_probs, rtol=1.1e-3, atol=1e-4)
    np.testing.assert_allclose(tail, their_tail, rtol=1e-3, atol=1e-4)


def test_the_rows_are_those_that_the_engine_logs_for_the_same_text(
    target: Target, logged: list[FeedbackRecord]
) -> None:
    found = by_id(rescore(target, logged, top_k=16))
    compared = 0
    for record in logged:
        positions = record.teacher.arrays()[0].tolist()
        agrees(found[record.record_id].record.teacher.at(positions), record.teacher)
        compared += len(positions)
    assert compared > 50


def test_rejected_positions_alone_are_the_logged_rows_of_greedy_requests(
    target: Target, logged: list[FeedbackRecord]
) -> None:
    greedy = [r for r in logged if r.greedy]
    for name, rescored in by_id(rescore(target, greedy, top_k=16, rows="rejected")).items():
        agrees(rescored.record.teacher, next(r.teacher for r in greedy if r.record_id == name))


def test_every_position_has_a_row_but_the_first_which_nobody_proposes_for(
    target: Target, logged: list[FeedbackRecord]
) -> None:
    found = by_id(rescore(target, logged))
    assert len(found) == len(logged)
    for rescored in found.values():
        record = rescored.record
        assert record.teacher.arrays()[0].tolist() == list(range(1, len(record.output)))
        assert record.teacher.top_k == 64
        validate(record, target.vocab_size)


def test_a_row_belongs_to_the_context_before_the_token_that_it_teaches(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    """The target's greedy answer is its own first choice at every position, and would not be one token off."""
    shifted = total = 0
    for rescored in rescore(target, answered):
        positions, ids, _, _ = rescored.record.teacher.arrays()
        output = rescored.record.output
        assert ids[:, 0].tolist() == output[positions].tolist()
        shifted, total = shifted + int((ids[:-1, 0] == output[positions][1:]).sum()), total + len(positions) - 1
    assert shifted < total / 2


def test_many_at_once_are_as_one_by_one_whatever_fits_into_a_pass(target: Target, logged: list[FeedbackRecord]) -> None:
    """100 tokens hold several records, 10 less than one: its passes then remember those before."""
    alone = {r.record_id: next(rescore(target, [r], (1, FINAL))) for r in logged}
    for tokens in (1000, 100, 10):
        together = by_id(rescore(target, logged, (1, FINAL), batch_tokens=tokens))
        assert together.keys() == alone.keys()
        for name, rescored in together.items():
            agrees(rescored.record.teacher, alone[name].record.teacher)
            assert rescored.hidden is not None
            torch.testing.assert_close(rescored.hidden, alone[name].hidden, rtol=1e-2, atol=1e-2)


def test_hidden_states_are_the_targets_own_at_the_prompts_end_and_the_output(
    target: Target, logged: list[FeedbackRecord]
) -> None:
    record = logged[-1]
    (rescored,) = rescore(target, [record], (2, 0), max_context=7)
    taps = Taps(target.model, (2, 0))
    with torch.no_grad(), taps.reading():
        target.model(input_ids=torch.tensor([[*record.prompt.tolist(), *record.output.tolist()]]))
    assert rescored.hidden is not None
    assert (len(record.prompt), len(rescored.hidden)) == (16, 7 + len(record.output))
    torch.testing.assert_close(rescored.hidden, taps.hidden()[0, 16 - 7 :].bfloat16(), rtol=1e-2, atol=1e-2)


def test_what_may_not_be_learnt_from_is_left_out(target: Target, logged: list[FeedbackRecord]) -> None:
    changed = msgspec.structs.replace
    refused = [
        changed(logged[0], train=False),
        changed(logged[1], structured=True),
        changed(logged[2], output_ids=logged[2].output_ids[:4]),  # the first token alone: nothing was proposed
        changed(logged[3], prompt_ids=logged[3].prompt_ids * 100),  # longer than the target's context
    ]
    assert list(rescore(target, refused)) == []
    assert len(list(rescore(target, [*refused, logged[4]]))) == 1


def test_no_more_than_a_pass_is_held_at_a_time(
    target: Target, logged: list[FeedbackRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results come out while later records are still unread, and no pass nor its logits is larger than was allowed."""
    passes, sizes = [], []
    forward, head = target.model.forward, target.model.get_output_embeddings()
    monkeypatch.setattr(
        target.model, "forward", lambda **given: passes.append(given["input_ids"].numel()) or forward(**given)
    )
    hook = head.register_forward_hook(lambda module, given, logits: sizes.append(logits.shape[:-1].numel()))
    found = rescore(target, logged, batch_tokens=70)
    next(found)
    assert len(passes) == 1
    assert len([*found]) == len(logged) - 1
    hook.remove()
    assert len(passes) > 3
    assert max(passes) <= 70
    assert sum(sizes) == sum(len(wanted(r, "verified")) for r in logged), "the head sees the wanted positions only"


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self) -> None:
        self.now = self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, self.slept + seconds

    @contextmanager
    def slow(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Every pass of the target takes three seconds."""
        forward = target.model.forward

        def passing(**given: object) -> object:
            self.now += 3.0
            return forward(**given)

        with monkeypatch.context() as patch:
            patch.setattr(target.model, "forward", passing)
            yield


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_it_computes_for_no_more_than_its_share_of_the_time(
    target: Target, logged: list[FeedbackRecord], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    clock = Clock()
    with clock.slow(target, monkeypatch):
        list(rescore(target, logged, batch_tokens=70, pace=Pace(share, lambda: clock.now, clock.sleep)))
    assert clock.now > 10
    assert (clock.now - clock.slept) / clock.now == pytest.approx(share)


def test_a_drafter_learns_as_much_from_rescored_rows_of_the_same_records(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    """Greedy requests: measured on others, by how often the drafter chooses the target's token."""
    parent = CausalLM.from_target(target.model, 1, torch.arange(200))
    records = [served(parent, answer) for answer in answered]
    config = DistilConfig(epochs=12, learning_rate=3e-3, batch_tokens=256)
    again = [found.record for found in rescore(target, records)]
    by_logged, by_rescored = (distil(parent, Lesson(r), config) for r in (records, again))
    assert by_rescored.report.positions == by_logged.report.positions
    agreement = [sum(matches(d, r).sum() for r in records) for d in (parent, by_logged.student, by_rescored.student)]
    assert agreement[2] > agreement[0]
    assert agreement[2] >= 0.95 * agreement[1]


def test_of_sampled_requests_it_learns_more_as_they_have_rows_everywhere(
    target: Target, logged: list[FeedbackRecord]
) -> None:
    sampled = [r for r in logged if not r.greedy]
    again = [found.record for found in rescore(target, sampled)]
    parent = CausalLM.from_target(target.model, 1, torch.arange(200))
    config = DistilConfig(epochs=12, learning_rate=3e-3, batch_tokens=256)
    by_logged, by_rescored = (distil(parent, Lesson(r), config) for r in (sampled, again))
    assert by_logged.report.positions == sum(len(r.teacher.arrays()[0]) for r in sampled)
    assert by_rescored.report.positions == sum(len(r.output) - 1 for r in sampled) > by_logged.report.positions
    gained = [np.mean([overlaps(d, r).mean() for r in again]) for d in (by_logged.student, by_rescored.student)]
    assert gained[1] > gained[0] + 0.02


def test_a_record_without_rows_is_taught_all_the_same(target: Target, answered: list[FeedbackRecord]) -> None:
    bare = msgspec.structs.replace(refusals(answered[0], [2, 5]), teacher=NO_ROWS)
    (found,) = rescore(target, [bare], rows="rejected")
    assert found.record.teacher.arrays()[0].tolist() == [2, 5]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingError, match="RESCORE_SHARE"):
        read(RescoreConfig, {"REDRAFT_RESCORE_SHARE": "0"})
    with pytest.raises(SettingError, match="RESCORE_TOKENS"):
        read(RescoreConfig, {"REDRAFT_RESCORE_TOKENS": "0"})
    with pytest.raises(SettingError, match="REDRAFT_TEACHER"):
        read(RescoreConfig, {"REDRAFT_TEACHER": "guessed"})
    assert read(RescoreConfig, {}) == replace(RescoreConfig(), teacher="logged")
