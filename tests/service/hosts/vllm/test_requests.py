"""What is learnt of a request equals what the scheduler counts, and an end that cuts a round short rejects nothing."""

import random

import pytest

from service.engine.floor import Proposed
from service.engine.generation import clipped
from service.hosts.vllm.requests import Request, Requests, made
from storage.records import Round
from tests.service.hosts.vllm.engine import Asked

PROMPT = [1, 2, 3]


def begun(requests: Requests, asked: Asked) -> Request:
    requests.began([asked.id])
    request = requests.of(asked.id, asked.state())
    assert request is not None
    return request


def asked(max_tokens: int = 50, stop: frozenset[int] = frozenset(), **params: object) -> Asked:
    return Asked("r1", PROMPT, [], max_tokens, stop, dict(params))


def learn(requests: Requests, request: Request, committed: list[int], verified: list[int]) -> Proposed | None:
    """A step in which the runner has what the proposer has."""
    return requests.learn(request, committed, verified, [*request.generation.output_ids, *committed])


def ended(requests: Requests) -> Request:
    request = requests.finish("r1", [])
    assert request is not None
    return request


def figures(rounds: list[Round]) -> list[tuple[int, int, int, int]]:
    return [(r.start, r.proposed, r.accepted, r.rejected_token) for r in rounds]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_equal_the_schedulers_own_counts_whatever_part_of_a_proposal_it_verifies(seed: int) -> None:
    chance, requests = random.Random(seed), Requests(1000)
    request, expected = begun(requests, asked()), []
    length = 0
    learn(requests, request, [chance.randrange(5)], [])
    for _ in range(12):
        length = len(request.generation.output_ids)
        proposal = chance.choices(range(5), k=chance.randint(0, 4))
        requests.proposed(request, proposal, version=3, draft_ms=1.0)
        verified = proposal[: chance.randint(0, len(proposal))]
        accepted = chance.randint(0, len(verified))
        refused = verified[accepted] if accepted < len(verified) else -1
        learn(requests, request, [*verified[:accepted], 9], verified)
        if verified:
            expected.append((length, len(verified), accepted, refused))
    assert figures(request.generation.rounds) == expected
    assert figures(ended(requests).generation.rounds) == figures(
        clipped(request.generation.rounds, len(request.generation.output_ids))
    )
    assert requests.strange == 0


def test_an_end_of_text_within_the_accepted_tokens_is_no_rejection_and_counts_what_was_committed() -> None:
    requests = Requests(1000)
    request = begun(requests, asked(stop=frozenset({7})))
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 7, 6, 6], version=1, draft_ms=0.0)
    proposed = learn(requests, request, [5, 7, 6, 2], [5, 7, 6, 6])  # the engine verifies on, past the end
    assert proposed is not None
    assert (proposed.proposed, proposed.accepted) == (2, 2)
    generation = ended(requests).generation
    assert generation.output_ids == [4, 5, 7]
    assert generation.finish_reason == "stop"
    assert figures(generation.rounds) == [(1, 2, 2, -1)]


def test_a_bound_on_the_tokens_that_cuts_a_round_is_no_rejection() -> None:
    requests = Requests(1000)
    request = begun(requests, asked(max_tokens=3))
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 6, 8], version=1, draft_ms=0.0)
    learn(requests, request, [5, 6, 9], [5, 6, 8])
    generation = ended(requests).generation
    assert generation.output_ids == [4, 5, 6]
    assert generation.finish_reason == "length"
    assert figures(generation.rounds) == [(1, 2, 2, -1)]


def test_a_rejection_whose_recovered_token_ends_the_text_stays_a_rejection() -> None:
    requests = Requests(1000)
    request = begun(requests, asked(stop=frozenset({7})))
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 6, 8], version=1, draft_ms=0.0)
    learn(requests, request, [5, 7], [5, 6, 8])
    assert figures(ended(requests).generation.rounds) == [(1, 2, 1, 6)]


def test_the_last_proposal_of_a_request_that_vanishes_was_neither_accepted_nor_rejected() -> None:
    requests = Requests(1000)
    request = begun(requests, asked())
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 6, 8], version=1, draft_ms=0.0)
    generation = ended(requests).generation
    assert generation.rounds == []
    assert generation.finish_reason == "cancelled"
    assert requests.finish("r1", []) is None


def test_tokens_that_the_engine_put_in_the_place_of_a_proposal_are_no_round() -> None:
    requests = Requests(1000)
    request = begun(requests, asked())
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 6, 8], version=1, draft_ms=0.0)
    assert learn(requests, request, [9], [0, 0, 0]) is None
    assert requests.strange == 1
    assert ended(requests).generation.rounds == []


def test_tokens_of_steps_without_the_proposer_are_taken_from_the_runner_and_their_rounds_are_not_known() -> None:
    requests = Requests(1000)
    request = begun(requests, asked())
    learn(requests, request, [4], [])
    requests.proposed(request, [5, 6, 8], version=1, draft_ms=0.0)
    assert requests.learn(request, [9], [0, 0, 0], [4, 5, 6, 7, 9]) is None
    assert request.generation.output_ids == [4, 5, 6, 7, 9]
    assert (requests.missed, request.generation.rounds) == (1, [])
    finished = requests.finish("r1", [4, 5, 6, 7, 9, 2])
    assert finished is not None
    assert finished.generation.output_ids == [4, 5, 6, 7, 9, 2]


def test_no_more_is_left_than_can_be_committed() -> None:
    requests = Requests(10)
    request = begun(requests, asked(max_tokens=50))
    assert request.left == 7
    learn(requests, request, [4, 4], [])
    assert request.left == 5
    other = begun(Requests(1000), asked(max_tokens=2, stop=frozenset({7})))
    assert other.left == 2


def test_a_request_that_went_on_past_what_looked_like_its_end_has_not_ended() -> None:
    requests = Requests(1000)
    request = begun(requests, asked(stop=frozenset({7})))
    learn(requests, request, [7], [])
    assert request.left == 0
    learn(requests, request, [3], [])
    assert ended(requests).generation.output_ids == [7, 3]


def test_a_client_says_workload_tenant_and_consent_with_vllm_xargs() -> None:
    said = {"redraft_workload": "sql", "redraft_tenant": "acme", "redraft_train": "no"}
    generation = made("r", asked(extra_args=said).state(), 100, 0.0).generation
    assert (generation.workload, generation.tenant, generation.train) == ("sql", "acme", False)
    plain = made("r", asked(extra_args={"redraft_workload": "x" * 65}).state(), 100, 0.0).generation
    assert (plain.workload, plain.tenant, plain.train) == ("default", "default", True)


@pytest.mark.parametrize(
    ("params", "policy", "adjusted", "structured"),
    [
        ({"temperature": 0.8, "top_p": 0.9, "top_k": -1}, "t0.8", False, False),
        ({"presence_penalty": 0.5}, "greedy", False, False),
        ({"bad_words": ["no"]}, "greedy", True, False),
        ({"min_tokens": 4}, "greedy", True, False),
        ({"structured_outputs": object()}, "greedy", False, True),
    ],
)
def test_a_requests_policy_is_vllms(params: dict[str, object], policy: str, adjusted: bool, structured: bool) -> None:
    request = made("r", asked(**params).state(), 100, 0.0)
    assert request.row_class.policy == policy
    assert (request.adjusted, request.structured) == (adjusted, structured)


def test_pictures_adapters_and_embeddings_are_not_recorded() -> None:
    for name, value in (("mm_features", [1]), ("lora_request", object()), ("prompt_token_ids", None)):
        state = asked().state()
        setattr(state, name, value)
        assert Requests(100).of("r", state) is None
