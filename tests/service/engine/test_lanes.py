"""Several drafters of one target at once, each serving the requests of its lane."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target
from service.engine.engine import Engine
from service.engine.memory import GIB, MemoryBound
from service.engine.residents import Resident, Residents
from tests.service.engine.oracle import Client, ask, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.small import LENGTH, PROMPT, exact, p_value, small_target
from tests.service.engine.test_floor import shuffled

ROUTES = {"sql": "for-sql", "code": "for-code"}
WORKLOADS = ("default", "sql", "code")


@contextmanager
def lanes(target: Target, **config: float) -> Iterator[Engine]:
    """Version 1 of the default drafter, version 7 for SQL and version 1 for code, with vocabularies of their own."""
    with running(target, first_layers(target, layers=2), **config) as engine:
        engine.swap(7, first_layers(target, layers=1, vocabulary=200), lane="for-sql").result(timeout=30)
        engine.swap(1, first_layers(target, layers=2, vocabulary=150), lane="for-code").result(timeout=30)
        engine.lanes.route(ROUTES)
        yield engine


def mixed(engine: Engine, prompts: list[list[int]], **options: object) -> list[Client]:
    """A request of each workload in turn, all at once."""
    return [ask(engine, p, workload=WORKLOADS[i % 3], **options) for i, p in enumerate(prompts)]


def test_rows_of_several_lanes_in_one_batch_change_no_token(target: Target) -> None:
    prompts = [random_prompt(target, seed, 5 + seed) for seed in range(18)]
    with lanes(target, slots=6) as engine:
        clients = mixed(engine, prompts)
        outputs = [client.wait() for client in clients]
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]
    for i, lane, version in ((0, "", 1), (1, "for-sql", 7), (2, "for-code", 1)):
        assert {client.generation.lane for client in clients[i::3]} == {lane}
        assert {r.version for client in clients[i::3] for r in client.usage.rounds} == {version}


def test_seeded_rows_say_the_same_in_every_lane(target: Target) -> None:
    policy = Policy(temperature=1.0)
    with lanes(target, slots=6) as engine:
        outputs = [client.wait() for client in mixed(engine, [random_prompt(target, 1)] * 12, policy=policy, seed=3)]
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("policy", [Policy(1.0), Policy(1.2, top_k=3)])
def test_sampled_rows_of_lanes_with_different_vocabularies_follow_the_targets_distribution(
    target: Target, policy: Policy
) -> None:
    """500 outputs of each of three lanes, in shared batches; a chi-squared test of each at 1e-6 (3e-6 together)."""
    small = small_target(target)
    vocabularies = (None, torch.tensor([4, 0, 2]), torch.tensor([1, 5]))
    with running(small, draft_length=2, context=16, slots=48, waiting=1500) as engine:
        for version, (workload, vocabulary) in enumerate(zip(WORKLOADS, vocabularies, strict=True), 1):
            drafter = CausalLM.from_target(small.model, 1, torch.arange(6) if vocabulary is None else vocabulary)
            engine.swap(version, drafter, lane=ROUTES.get(workload, "")).result(timeout=30)
        engine.lanes.route(ROUTES)
        clients = [ask(engine, PROMPT, LENGTH, policy, workload=WORKLOADS[i % 3]) for i in range(1500)]
        outputs = [tuple(client.wait()) for client in clients]
        rounds = [[r for client in clients[i::3] for r in client.usage.rounds] for i in range(3)]
    for i in range(3):
        assert p_value(outputs[i::3], exact(small, policy)) > 1e-6
        assert 0 < sum(r.accepted for r in rounds[i]) < sum(r.proposed for r in rounds[i])


def test_a_swap_in_one_lane_leaves_the_others(target: Target) -> None:
    prompts = [random_prompt(target, seed) for seed in range(9)]
    with lanes(target) as engine:
        clients = mixed(engine, prompts)
        engine.swap(8, first_layers(target, layers=1, seed=1), lane="for-sql").result(timeout=30)
        outputs = [client.wait() for client in clients]
        after = [client.usage.rounds for client in mixed(engine, prompts)]
        assert [engine.lanes.version(lane) for lane in ("", "for-sql", "for-code")] == [1, 8, 1]
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]
    assert [{r.version for rounds in after[i::3] for r in rounds} for i in range(3)] == [{1}, {8}, {1}]


def test_a_broken_drafter_is_taken_back_in_its_lane_alone(target: Target) -> None:
    """Both lanes have a version 1, and the default one a version 2 that is on trial as well."""
    prompts = [random_prompt(target, seed) for seed in range(60)]
    with lanes(target) as engine:
        [client.wait() for client in mixed(engine, prompts)]
        engine.swap(2, first_layers(target, layers=2), 0.2, guarded=True).result(timeout=30)
        engine.swap(2, shuffled(target), 0.2, guarded=True, lane="for-code").result(timeout=30)
        outputs = [client.wait() for client in mixed(engine, prompts)]
        assert engine.lanes.broken("for-code") is not None
        assert [engine.lanes.broken(lane) for lane in ("", "for-sql")] == [None, None]
        assert [engine.lanes.version(lane) for lane in ("", "for-sql", "for-code")] == [2, 7, 1]
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]


def test_a_drafter_that_raises_errors_is_left_out_in_its_lane_alone(target: Target) -> None:
    faulty = first_layers(target, layers=2)
    prompts = [random_prompt(target, seed) for seed in range(9)]
    with lanes(target) as engine:
        engine.swap(2, faulty, lane="for-code").result(timeout=30)
        faulty.head.forward = None
        outputs = [client.wait() for client in mixed(engine, prompts)]
        assert [engine.lanes.version(lane) for lane in ("", "for-sql", "for-code")] == [1, 7, 0]
        assert engine.lanes.faults == 1
        later = ask(engine, prompts[0], workload="code")
        assert {r.version for r in later.usage.rounds} == {1}
        assert later.generation.lane == ""
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]


def test_a_route_to_a_drafter_that_is_not_there_leads_to_the_default_lane(target: Target) -> None:
    with running(target, first_layers(target)) as engine:
        engine.lanes.route({"sql": "not loaded yet"})
        client = ask(engine, random_prompt(target, 1), workload="sql")
        assert {r.version for r in client.usage.rounds} == {1}
        assert client.generation.lane == ""


def test_a_request_whose_lane_goes_is_decoded_plainly_to_its_end(target: Target) -> None:
    residents = Residents()
    residents.swap(Resident(1, first_layers(target), lane="for-sql"))
    residents.routes = {"sql": "for-sql"}
    with running(target) as engine:
        generation = ask(engine, random_prompt(target, 1), workload="sql").generation
    generation.lane = residents.admit("sql")
    assert residents.of(generation).version == 1
    residents.swap(Resident(0, lane="for-sql"))
    assert residents.of(generation).drafter is None
    assert residents.admit("sql") == ""


def test_the_bound_on_memory_holds_over_all_lanes(target: Target) -> None:
    layer = 2 * 2 * 8 * 4  # keys and values, key-value heads, head dimension, bytes
    room = 4 * (128 + 4 + 2) * layer * (3 + 1 + 1) / GIB  # the target's layers, and two drafters of one
    with running(target, first_layers(target), kv_memory=room) as engine:
        engine.swap(1, first_layers(target, seed=1), lane="a").result(timeout=30)
        with pytest.raises(MemoryBound, match="drafter version 1"):
            engine.swap(1, first_layers(target, seed=2), lane="b")
        with pytest.raises(MemoryBound, match="drafter version 2"):
            engine.swap(2, first_layers(target, seed=3), holdback=0.1)
        engine.swap(0, None, lane="a").result(timeout=30)
        assert engine.swap(1, first_layers(target, seed=2), lane="b").result(timeout=30) == 1
        engine.swap(0, None, lane="b").result(timeout=30)
        engine.swap(2, first_layers(target, seed=3), holdback=0.1).result(timeout=30)
        with pytest.raises(MemoryBound):
            engine.swap(1, first_layers(target, seed=4), lane="c")
        engine.lanes.hold(0.0).result(timeout=30)
        assert engine.swap(1, first_layers(target, seed=4), lane="c").result(timeout=30) == 1
