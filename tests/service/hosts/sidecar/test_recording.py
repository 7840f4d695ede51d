"""From an observed answer to a feedback record."""

from dataclasses import replace

import numpy as np
import pytest

from service.hosts.lossy import Guard
from service.hosts.sidecar.asking import Asked, Wants
from service.hosts.sidecar.dialects import COMPLETIONS, Form
from service.hosts.sidecar.reading import Seen, read, teacher
from service.hosts.sidecar.recording import Answered, Sender, Told, Unusable, record_of
from service.hosts.sidecar.rounds import Steps
from service.origin import Origin
from storage.records import decode, encode
from storage.validation import validate

VOCAB = 50
ASKED = Asked(
    Form(COMPLETIONS, False), Wants(False, False, False, False), 0.0, 1.0, 0, bound=False, limit=None, adjusted=False
)
ANSWERED = Answered("r1", Sender("sql", "acme"), ASKED, 10.0, 10.5, 12.0, version=4)
TOLD = Told(Origin("t" * 64, "k" * 64, "d"), temperature=1.0, top_k=3, lossless=True)


def _seen(output: list[int], steps: Steps | None, k: int = 4) -> Seen:
    """A greedy answer whose rows have the chosen token first."""
    rows = [([token, *((token + i) % VOCAB for i in range(1, k))], [-0.1, -3.0, -4.0, -5.0][:k]) for token in output]
    return Seen("cmpl-1", [1, 2], 2, len(output), output, "stop", steps, None, list(rows), [-0.1] * len(output))


def test_a_record_has_the_rounds_and_the_rows_of_their_rejections() -> None:
    seen = _seen([5, 6, 7, 8, 9, 10], Steps((1, 2), (3, 3), 3))
    record = record_of(ANSWERED, seen, TOLD)
    validate(decode(encode(record)), VOCAB)
    assert [(r.start, r.proposed, r.accepted, r.version) for r in record.rounds] == [(1, 3, 1, 4), (3, 3, 2, 4)]
    positions, ids, log_probs, tail = record.teacher.arrays()
    assert positions.tolist() == [2, 5]
    assert ids[:, 0].tolist() == [7, 10]
    np.testing.assert_allclose(np.exp(log_probs).sum(1) + np.exp(tail), 1, atol=1e-3)
    assert (record.positions, record.source, record.workload, record.tenant) == ("exact", "sidecar", "sql", "acme")
    assert (record.request_id, record.record_id) == ("cmpl-1", "r1")
    assert (record.time_to_first_token_ms, record.total_ms) == (500.0, 2000.0)


def test_a_sampled_request_has_a_row_at_every_position_that_a_drafter_proposes_for() -> None:
    answered = replace(ANSWERED, asked=replace(ASKED, temperature=None))
    record = record_of(answered, _seen([5, 6, 7, 8, 9, 10], Steps((1, 2), (3, 3), 3)), TOLD)
    assert record.temperature == 1.0
    assert record.teacher.arrays()[0].tolist() == [1, 2, 3, 4, 5]
    validate(record, VOCAB)


def test_an_engine_that_accepts_what_its_target_would_not_say_is_found_out_by_the_rows_of_accepted_tokens() -> None:
    """What it says in a refused token's place is the target's own even then."""
    seen, guard = _seen([5, 6, 7, 8, 9, 10], Steps((1, 2), (3, 3), 3)), Guard()
    for accepted in (1, 3, 4):
        seen.rows[accepted] = ([40, 41, 42, 43], [-0.1, -3.0, -4.0, -5.0])
    guard.answered(record_of(ANSWERED, seen, replace(TOLD, lossless=guard.lossless)))
    assert guard.losslessness == "lossy"


def test_a_form_marks_the_record_and_teaches_nothing() -> None:
    answered = replace(ANSWERED, asked=replace(ASKED, bound=True))
    record = record_of(answered, _seen([5, 6, 7, 8, 9, 10], Steps((1, 2), (3, 3), 3)), TOLD)
    assert record.structured
    assert record.positions == "approx"
    assert not record.teacher.positions


def test_of_a_client_that_opted_out_only_counts_leave_the_sidecar() -> None:
    answered = replace(ANSWERED, sender=Sender(train=False))
    record = record_of(answered, _seen([5, 6, 7, 8, 9, 10], Steps((1, 2), (3, 3), 3)), TOLD)
    assert not record.train
    assert not record.prompt.any()
    assert not record.output.any()
    assert not record.teacher.positions
    assert len(record.rounds) == 2
    validate(record, VOCAB)


def test_a_request_during_which_the_drafter_was_swapped_has_no_rounds() -> None:
    record = record_of(replace(ANSWERED, version=None), _seen([5, 6, 7], Steps((1,), (3,), 3)), TOLD)
    assert (record.rounds, record.positions) == ((), "none")
    validate(record, VOCAB)


@pytest.mark.parametrize("seen", [Seen(), Seen(prompt_ids=[1]), Seen(output_ids=[1])])
def test_an_answer_without_token_ids_makes_no_record(seen: Seen) -> None:
    with pytest.raises(Unusable, match="no_token_ids"):
        record_of(ANSWERED, seen, TOLD)


def test_a_prompt_that_is_not_as_long_as_the_engine_says_makes_no_record() -> None:
    seen = _seen([5, 6, 7], None)
    seen.prompt_tokens = 9
    with pytest.raises(Unusable, match="other_prompt"):
        record_of(ANSWERED, seen, TOLD)


def test_an_answer_that_leaves_tokens_out_makes_no_record() -> None:
    seen = _seen([5, 6, 7], None)
    seen.output_tokens = 24
    with pytest.raises(Unusable, match="tokens_missing"):
        record_of(ANSWERED, seen, TOLD)


@pytest.mark.parametrize(
    "chosen", [[0.0, 0.0, 0.0], [-0.1, 0.5, -0.1], [-0.1, float("nan"), -0.1]], ids=["all_zero", "positive", "nan"]
)
def test_log_probabilities_that_cannot_be_are_not_taught(chosen: list[float]) -> None:
    seen = _seen([5, 6, 7], None)
    seen.chosen, seen.rows = chosen, [seen.rows[0], None, None] if chosen[0] == 0 else seen.rows
    assert not teacher(seen, [0, 1, 2], 4).positions


def test_rows_are_cut_to_the_shortest_of_them_and_sorted() -> None:
    content = (
        b'{"choices":[{"logprobs":{"tokens":["token_id:3","token_id:4"],"token_logprobs":[-2.0,-0.2],"top_logprobs":['
    )
    content += b'{"token_id:3":-2.0,"token_id:9":-0.5},{"token_id:4":-0.2,"token_id:1":-3.0,"token_id:2":-4.0}]},'
    content += b'"prompt_token_ids":[7],"token_ids":[3,4],"finish_reason":"stop"}]}'
    seen = read([content])
    rows = teacher(seen, [0, 1], 8)
    assert rows.top_k == 2
    assert rows.arrays()[1].tolist() == [[9, 3], [4, 1]]


def test_sglang_s_totals_are_read_under_new_and_old_names() -> None:
    for proposed, correct in (
        ("spec_num_proposed_drafts", "spec_num_correct_drafts"),
        ("spec_draft_token_num", "spec_accept_token_num"),
    ):
        text = b'{"choices":[],"sglext":{"input_ids":[1],"output_ids":[[2,3]],"spec_tokens_details":'
        text += b'{"spec_verify_ct":4,"%s":12,"%s":5,"spec_correct_drafts_histogram":[1,2,0,1]}}}' % (
            proposed.encode(),
            correct.encode(),
        )
        seen = read([text])
        assert (seen.prompt_ids, seen.output) == ([1], [2, 3])
        assert seen.totals is not None
        assert (seen.totals.rounds, seen.totals.proposed, seen.totals.accepted) == (4, 12, 5)
        assert seen.steps is None


def test_llama_cpp_names_its_tokens_in_the_log_probabilities() -> None:
    entry = b'{"id":%d,"token":"x","bytes":[120],"logprob":0.0,"top_logprobs":[]}'
    text = b'{"choices":[{"finish_reason":"stop","logprobs":{"content":[%s,%s]}}]}' % (entry % 4, entry % 9)
    seen = read([text])
    assert seen.output == [4, 9]
    assert not teacher(seen, [0, 1], 4).positions
