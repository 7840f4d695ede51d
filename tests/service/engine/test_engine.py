"""The engine against the slow oracle: speculative equals plain, batched equals single, in every situation."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.policy import Policy
from adapter.target import Target
from service.engine.engine import Engine, EngineConfig, PromptTooLong
from service.engine.generation import clipped
from service.engine.inbox import Busy
from storage.records import Round
from tests.service.engine.oracle import GREEDY, ask, check_swaps, first_layers, plain_greedy, random_prompt, running


@pytest.mark.parametrize("k", range(1, 9))
def test_speculative_greedy_output_equals_plain_greedy_output(target: Target, k: int) -> None:
    with running(target, first_layers(target, layers=2), draft_length=k) as engine:
        for seed in range(4):
            prompt = random_prompt(target, seed)
            assert ask(engine, prompt).wait() == plain_greedy(target, prompt, 24)


def test_a_reduced_draft_vocabulary_changes_no_token(target: Target) -> None:
    with running(target, first_layers(target, layers=2, vocabulary=100)) as engine:
        for seed in range(4):
            prompt = random_prompt(target, seed)
            assert ask(engine, prompt).wait() == plain_greedy(target, prompt, 24)


def test_some_proposals_are_accepted_and_some_refused(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        rounds = [r for seed in range(8) for r in ask(engine, random_prompt(target, seed)).usage.rounds]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


def test_a_drafter_that_is_the_target_is_always_right(target: Target) -> None:
    with running(target, first_layers(target, layers=3), draft_length=4) as engine:
        usage = ask(engine, random_prompt(target, 5), max_tokens=21).usage
    assert [(r.proposed, r.accepted) for r in usage.rounds] == [(4, 4)] * 4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 30), st.sampled_from([None, 0, 1, 2, 4])),
        min_size=2,
        max_size=9,
    )
)
def test_batched_equals_single_whatever_joins_and_leaves(
    target: Target, requests: list[tuple[int, int, int | None]]
) -> None:
    with running(target, first_layers(target, layers=2), slots=3) as engine:
        clients = [
            ask(engine, random_prompt(target, length, length), most, draft_length=k) for length, most, k in requests
        ]
        for client, (length, most, _) in zip(clients, requests, strict=True):
            assert client.wait() == plain_greedy(target, random_prompt(target, length, length), most)


def test_swaps_in_the_middle_of_a_request_change_no_token(target: Target) -> None:
    line = [first_layers(target, layers=1 + n % 3, seed=n) for n in range(2, 10)]
    clients = check_swaps(target, first_layers(target, layers=1), line)
    assert len({r.version for client in clients for r in client.usage.rounds}) > 1


def test_sampled_requests_repeat_under_their_seed_alone_and_batched(target: Target) -> None:
    policy = Policy(temperature=0.9, top_p=0.95)
    prompt = random_prompt(target, 3)
    with running(target, first_layers(target, layers=2)) as engine:
        alone = ask(engine, prompt, policy=policy, seed=7).wait()
        others = [ask(engine, random_prompt(target, s), policy=policy, seed=s, draft_length=s) for s in range(3)]
        together = ask(engine, prompt, policy=policy, seed=7).wait()
        other_seed = ask(engine, prompt, policy=policy, seed=8).wait()
        assert [len(o.wait()) > 0 for o in others] == [True] * 3
    assert alone == together != other_seed


def test_without_a_drafter_decoding_is_plain(target: Target) -> None:
    prompt = random_prompt(target, 1)
    with running(target) as engine:
        client = ask(engine, prompt)
        assert client.wait() == plain_greedy(target, prompt, 24)
        assert client.usage.rounds == ()


def test_a_drafter_that_fails_costs_no_request(target: Target) -> None:
    broken = first_layers(target, layers=1)
    prompt = random_prompt(target, 1)
    with running(target, broken) as engine:
        client = ask(engine, prompt, max_tokens=60)
        broken.head = torch.nn.Linear(1, 1)
        assert client.wait() == plain_greedy(target, prompt, 60)
        assert ask(engine, prompt).wait() == plain_greedy(target, prompt, 24)
        assert (engine.lanes.faults, engine.lanes.version()) == (1, 0)


def test_a_stop_string_ends_the_text_before_it(target: Target) -> None:
    prompt = random_prompt(target, 2)
    with running(target, first_layers(target, layers=2)) as engine:
        whole = ask(engine, prompt, max_tokens=40)
        whole.wait()
        stop = whole.text[10:13]
        cut = ask(engine, prompt, max_tokens=40, stop=(stop,))
        cut.wait()
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.last is not None
    assert cut.last.finish_reason == "stop"


def test_an_end_of_text_token_ends_the_request(target: Target) -> None:
    prompt = random_prompt(target, 4)
    output = plain_greedy(target, prompt, 20)
    ending = Target(**{**vars(target), "eos_ids": frozenset({output[5]})})
    with running(ending, first_layers(target, layers=2)) as engine:
        client = ask(engine, prompt)
        assert client.wait() == plain_greedy(ending, prompt, 24)
        assert all(r.start + r.accepted <= len(client.tokens) for r in client.usage.rounds)


def test_a_request_past_the_context_is_refused(target: Target) -> None:
    with running(target) as engine, pytest.raises(PromptTooLong, match="context of 128"):
        ask(engine, random_prompt(target, 1, 100), max_tokens=29)


def test_a_request_that_fills_the_context_is_served(target: Target) -> None:
    prompt = random_prompt(target, 1, 100)
    with running(target, first_layers(target, layers=3)) as engine:
        assert ask(engine, prompt, max_tokens=28).wait() == plain_greedy(target, prompt, 28)


def test_more_waiting_requests_than_allowed_are_refused(target: Target) -> None:
    engine = Engine(target, EngineConfig(waiting=2), lambda generation: None)
    ask(engine, [5])
    ask(engine, [5])
    with pytest.raises(Busy):
        ask(engine, [5])


def test_a_cancelled_request_frees_its_slot(target: Target) -> None:
    with running(target, first_layers(target), slots=1) as engine:
        first = ask(engine, random_prompt(target, 1), max_tokens=100)
        second = ask(engine, random_prompt(target, 2))
        engine.cancel(first.generation.request_id)
        assert second.wait() == plain_greedy(target, random_prompt(target, 2), 24)
        first.wait()
    assert first.last is not None
    assert first.last.finish_reason in ("cancelled", "length")


def test_stopping_ends_what_is_running_and_waiting(target: Target) -> None:
    engine = Engine(target, EngineConfig(slots=1, context=400), lambda generation: None)
    clients = [ask(engine, random_prompt(target, s), max_tokens=380) for s in range(3)]
    engine.start()
    engine.stop()
    for client in clients:
        client.wait()
        assert client.last is not None
        assert client.last.finish_reason == "cancelled"


def test_teacher_rows_stand_at_rejection_positions_and_name_the_emitted_token(target: Target) -> None:
    with running(target, first_layers(target, layers=1)) as engine:
        client = ask(engine, random_prompt(target, 6), max_tokens=40)
        output = client.wait()
    rejections = [r.start + r.accepted for r in client.usage.rounds if r.accepted < r.proposed]
    assert [t.position for t in client.generation.teacher] == rejections
    assert all(int(t.ids[0]) == output[t.position] for t in client.generation.teacher)


def test_a_client_that_opts_out_leaves_no_teacher_rows(target: Target) -> None:
    with running(target, first_layers(target, layers=1)) as engine:
        client = ask(engine, random_prompt(target, 6), train=False)
        client.wait()
    assert client.usage.rounds
    assert client.generation.teacher == []


def test_a_round_cut_short_is_no_rejection() -> None:
    cut, whole = Round(4, 1, 4, 3, 77, 0.5, 1.0, 1.0), Round(0, 1, 4, 2, 9, 0.5, 1.0, 1.0)
    kept = clipped([whole, cut], length=6)
    assert kept[0] == whole
    assert (kept[1].proposed, kept[1].accepted, kept[1].rejected_token) == (2, 2, -1)


def test_greedy_and_sampled_requests_share_a_batch(target: Target) -> None:
    prompt = random_prompt(target, 9)
    with running(target, first_layers(target, layers=2)) as engine:
        sampled = ask(engine, prompt, policy=Policy(temperature=1.0), seed=1)
        greedy = ask(engine, prompt, policy=GREEDY)
        assert greedy.wait() == plain_greedy(target, prompt, 24)
        assert len(sampled.wait()) > 0
