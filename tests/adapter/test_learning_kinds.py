"""Each kind learns from what the target reads again: at every depth, repeatably, and replay says what serving does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapter.batch import example, packed, padded
from adapter.distil import DistilConfig, Distilled, TrainingFailed, distil
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.protocol import Shape
from adapter.loss import LOSSES, drafter_rows
from adapter.passes import RowLosses
from adapter.replay import evaluate, matches, matches_by_depth, overlaps, rounds
from adapter.target import Target
from storage.records import FeedbackRecord
from tests.adapter.conditioned import CONDITIONED, WHOLE, Server, first, hidden_of, read_again, shaken
from tests.service.engine.oracle import ask, running

DEPTHS = 3
QUICK = DistilConfig(epochs=40, learning_rate=1e-2, batch_tokens=512, max_context=WHOLE)


@pytest.fixture(scope="module", params=CONDITIONED)
def parent(request: pytest.FixtureRequest, target: Target) -> LearntDrafter:
    return first(target, request.param, DEPTHS)


@pytest.fixture(scope="module")
def made(target: Target, parent: LearntDrafter, answered: list[FeedbackRecord]) -> Distilled:
    return distil(parent, read_again(target, parent, answered), QUICK)


def shares(target: Target, drafter: LearntDrafter, answered: list[FeedbackRecord]) -> list[float]:
    """By depth: how often the emitted token is what the drafter proposes when it was right so far."""
    lesson = read_again(target, drafter, answered)
    found = [matches_by_depth(drafter, r, DEPTHS, lesson.hidden[r.record_id]) for r in lesson.window]
    return [float(np.mean(np.concatenate([m[j, 1 + j :] for m in found]))) for j in range(DEPTHS)]


def test_every_depth_learns(
    target: Target, parent: LearntDrafter, made: Distilled, answered: list[FeedbackRecord]
) -> None:
    before, after = (shares(target, drafter, answered) for drafter in (parent, made.student))
    assert all(a > b + 0.1 for a, b in zip(after, before, strict=True)), (before, after)
    assert made.report.last_loss < made.report.first_loss


def test_the_same_inputs_give_the_same_weights_bit_for_bit(
    target: Target, parent: LearntDrafter, answered: list[FeedbackRecord]
) -> None:
    lesson, config = read_again(target, parent, answered[:6]), replace(QUICK, epochs=2)
    torch.manual_seed(1)
    one = distil(parent, lesson, config).student
    torch.manual_seed(2)
    two = distil(parent, lesson, config).student
    for name, tensor in one.own_tensors().items():
        assert torch.equal(tensor, two.own_tensors()[name]), name


def test_what_is_the_targets_stays_as_it_is(target: Target, made: Distilled, parent: LearntDrafter) -> None:
    drafter = made.student
    if drafter.decoder is not None:
        assert drafter.decoder.get_input_embeddings().weight.data_ptr() == target.embedding.data_ptr()
    assert torch.equal(drafter.draft_to_target, parent.draft_to_target)
    assert set(drafter.own_tensors()) == set(parent.own_tensors())


def test_records_that_were_not_read_again_are_left_out(
    target: Target, parent: LearntDrafter, answered: list[FeedbackRecord]
) -> None:
    lesson, config = read_again(target, parent, answered[:4]), replace(QUICK, epochs=1)
    kept = replace(lesson, hidden={r.record_id: lesson.hidden[r.record_id] for r in lesson.window[:2]})
    assert distil(parent, kept, config).report.positions == sum(len(r.output) - 1 for r in lesson.window[:2])
    with pytest.raises(TrainingFailed, match="hidden states that the drafter needs were not read"):
        distil(parent, replace(lesson, hidden={}), config)


def test_hidden_states_of_another_context_are_not_taken(
    target: Target, parent: LearntDrafter, answered: list[FeedbackRecord]
) -> None:
    with pytest.raises(ValueError, match="max_context is not the same"):
        distil(parent, read_again(target, parent, answered[:1], 2), replace(QUICK, max_context=3))


@pytest.mark.parametrize("collate", [padded, packed])
def test_a_row_is_taught_to_depth_j_at_the_index_j_before_its_own(
    target: Target, parent: LearntDrafter, answered: list[FeedbackRecord], collate: type
) -> None:
    """Held against the logits that the drafter has when the tokens before are drafted one by one."""
    drafter = shaken(parent.twin())
    lesson = read_again(target, drafter, answered[:3])
    everything = torch.arange(target.vocab_size)
    made = [example(r, everything, WHOLE, hidden=lesson.hidden[r.record_id]) for r in lesson.window]
    batch = collate([e for e in made if e is not None])
    with torch.no_grad():
        values, weights = RowLosses(drafter, "forward_kl")(batch)
    expected, weighed = [], []
    for depth in range(DEPTHS):
        for record, e in zip(lesson.window, made, strict=True):
            assert e is not None
            text, hidden = [*record.prompt.tolist(), *record.output.tolist()], lesson.hidden[record.record_id]
            for row, at in enumerate(e.at.tolist()):
                begin = at - depth
                cut = torch.tensor([text[: at + 1]])
                with torch.no_grad():
                    *_, state = drafter.unrolled(cut, hidden[None, : at + 1].float(), None, depth + 1)
                    log_q = drafter_rows(drafter.logits(state[:, begin], depth), e.ids[row : row + 1])
                expected.append(LOSSES["forward_kl"](e.log_p[row : row + 1], log_q))
                weighed.append(drafter.depth_decay**depth)
    if drafter.early is not None:  # which says the token itself, from the state of the one before
        for record, e in zip(lesson.window, made, strict=True):
            assert e is not None
            with torch.no_grad():
                states = drafter.exit_states(lesson.hidden[record.record_id][e.at].float())
                assert states is not None
                log_q = drafter_rows(drafter.logits(states), e.ids)
            expected.append(LOSSES["forward_kl"](e.log_p, log_q))
            weighed += [1.0] * len(e.at)
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(weights, torch.tensor(weighed))


def test_replay_gives_every_round_of_a_real_speculative_decode(
    target: Target, made: Distilled, answered: list[FeedbackRecord]
) -> None:
    """Drafting equals replay: the drafter in its memory, round after round, against one teacher-forced pass."""
    drafter = made.student
    lesson = read_again(target, drafter, answered[:6])
    accepted = 0
    for record in lesson.window:
        for k in (2, DEPTHS, DEPTHS + 2):
            played = rounds(matches_by_depth(drafter, record, k, lesson.hidden[record.record_id]), k)
            assert played == speculative(target, drafter, record, k)
            accepted += sum(a for _, a in played)
    assert accepted > 20, "a drafter that is never right would prove nothing"


def speculative(target: Target, drafter: LearntDrafter, record: FeedbackRecord, k: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of the rounds of a slow server whose greedy output is the record's."""
    prompt, output = record.prompt.tolist(), record.output.tolist()
    server, played, done = Server(target, drafter, 1, 256), [], 1
    while done < len(output):
        text = [prompt + output[:done]]
        server.follow(text)
        with torch.inference_mode():
            made = drafter.propose(server.memory, server.rows(text, k), Shape.chain(k))
        chain = made.tokens[0].tolist()[: len(output) - done]
        right = [a == b for a, b in zip(chain, output[done:], strict=False)]
        accepted = right.index(False) if False in right else len(right)
        played.append((len(chain), accepted))
        done += accepted + 1
    return played


def test_the_engine_plays_the_rounds_that_replay_says(
    target: Target, made: Distilled, answered: list[FeedbackRecord]
) -> None:
    """All requests in one batch, as the version that came out of training is served."""
    lesson = read_again(target, made.student, answered[:8])
    with running(target, made.student.twin(), slots=4, draft_length=DEPTHS) as engine:
        clients = [ask(engine, record.prompt.tolist(), len(record.output)) for record in lesson.window]
        served = [[(r.proposed, r.accepted) for r in client.usage.rounds] for client in clients]
    assert [client.tokens for client in clients] == [record.output.tolist() for record in lesson.window]
    hidden = lesson.hidden
    for record, played in zip(lesson.window, served, strict=True):
        replayed = rounds(matches_by_depth(made.student, record, DEPTHS, hidden[record.record_id]), DEPTHS)
        full = 0  # a server proposes less where an answer is about to reach its limit
        while full < len(replayed) and sum(a + 1 for _, a in replayed[: full + 1]) < len(record.output) - DEPTHS:
            full += 1
        assert played[:full] == replayed[:full]


def test_the_gate_sees_that_a_student_is_better(
    target: Target, parent: LearntDrafter, made: Distilled, answered: list[FeedbackRecord]
) -> None:
    lesson = read_again(target, parent, answered)
    overall = evaluate(made.student, parent, lesson.window, k=4, hidden=lesson.hidden).overall
    assert overall.requests == len(answered)
    assert overall.gain_low > 0
    assert overall.candidate_length > overall.parent_length
    assert evaluate(made.student, parent, lesson.window, k=4).overall.requests == 0, "nothing without hidden states"


def test_the_acceptance_probability_is_that_of_a_proposals_first_token(
    target: Target, made: Distilled, answered: list[FeedbackRecord]
) -> None:
    drafter = made.student
    (record,) = read_again(target, drafter, answered[:1], top_k=target.vocab_size).window
    prompt, output = record.prompt.tolist(), record.output.tolist()
    hidden = hidden_of(target, drafter, prompt + output)
    found = overlaps(drafter, record, hidden)
    for row, position in enumerate(record.teacher.arrays()[0].tolist()[:5]):
        text = prompt + output[:position]
        with torch.inference_mode():
            p = target.model(input_ids=torch.tensor([text])).logits[0, -1].softmax(-1)
            state = next(drafter.unrolled(torch.tensor([text]), hidden[None, : len(text)], None, 1))
            q = drafter.logits(state[0, -1]).softmax(-1)
        exact = float(torch.minimum(p, q).sum())
        assert found[row] == pytest.approx(exact, abs=0.005)  # rows are in fp16


def test_a_first_choice_is_a_match_at_depth_0(target: Target, made: Distilled, answered: list[FeedbackRecord]) -> None:
    lesson = read_again(target, made.student, answered[:2])
    for record in lesson.window:
        hidden = lesson.hidden[record.record_id]
        by_depth = matches_by_depth(made.student, record, DEPTHS, hidden)
        assert np.array_equal(matches(made.student, record, hidden), by_depth[0])
