"""Typical acceptance through the whole engine: lossy for the requests that ask for it, and for nobody and nothing else.

Draws are held against exact probabilities as in test_sampling; see there for the chances of a false alarm.
"""

import pytest

from adapter.policy import Policy
from adapter.target import Target
from adapter.typical import Typical
from service.engine.pace import class_of
from service.engine.survival import RowClass, Survival
from service.origin import Origin
from service.recording import record_of
from tests.service.engine.oracle import Client, ask, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.small import LENGTH, PROMPT, Output, exact, p_value, small_target
from tests.service.engine.test_sampling import FALSE_ALARM
from tests.service.engine.test_trees import row_of
from tests.service.serving import until

HOT = Policy(1.0)
RULE = Typical()
NEVER_TYPICAL = Typical(1.0, 1e9)
REQUESTS = 400
SHAPES = [{"draft_length": 2}, {"draft_length": 3, "tree_nodes": 7}]


@pytest.fixture(scope="module")
def small(target: Target) -> Target:
    return small_target(target)


def outputs(target: Target, rule: Typical, shape: dict[str, int]) -> tuple[list[Output], list[Client]]:
    options = {"slots": 32, "context": 16, "waiting": REQUESTS, **shape}
    with running(target, first_layers(target, layers=1, seed=3), **options) as engine:
        clients = [ask(engine, PROMPT, LENGTH, HOT, typical=rule) for _ in range(REQUESTS)]
        return [tuple(client.wait()) for client in clients], clients


@pytest.mark.parametrize("shape", SHAPES, ids=["chains", "trees"])
def test_where_no_token_can_be_typical_the_output_follows_the_targets_distribution(
    small: Target, shape: dict[str, int]
) -> None:
    found, clients = outputs(small, NEVER_TYPICAL, shape)
    assert p_value(found, exact(small, HOT)) > FALSE_ALARM
    assert sum(r.accepted for client in clients for r in client.usage.rounds) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=["chains", "trees"])
def test_with_the_papers_thresholds_it_does_not_so_the_label_is_deserved(small: Target, shape: dict[str, int]) -> None:
    assert p_value(outputs(small, RULE, shape)[0], exact(small, HOT)) < FALSE_ALARM


def test_requests_that_did_not_ask_are_served_exactly_beside_those_that_did(target: Target) -> None:
    prompts = [random_prompt(target, seed, 6 + seed) for seed in range(6)]
    with running(target, first_layers(target, layers=2), slots=12, tree_nodes=10, draft_length=4) as engine:
        both = [(ask(engine, p, 30), ask(engine, p, 30, HOT, typical=RULE)) for p in prompts]
        greedy, lenient = [exact for exact, _ in both], [lossy for _, lossy in both]
        assert [client.wait() for client in greedy] == [plain_greedy(target, prompt, 30) for prompt in prompts]
        assert all(len(client.wait()) > 0 for client in lenient)
        assert engine.lanes.faults == 0


def test_one_token_policies_say_the_same_with_it_and_without(target: Target) -> None:
    prompt, certain = random_prompt(target, 3), Policy(1.0, top_k=1)
    with running(target, first_layers(target, layers=2), draft_length=4) as engine:
        said = [ask(engine, prompt, 30, policy, typical=RULE).wait() for policy in (certain, Policy(0.0))]
    assert said == [plain_greedy(target, prompt, 30)] * 2


def test_the_audit_leaves_lossy_requests_out_and_says_how_many(target: Target) -> None:
    with running(target, first_layers(target, layers=2), audit_share=1.0) as engine:
        for _ in range(3):
            ask(engine, random_prompt(target, 1), 12, typical=RULE).wait()
        ask(engine, random_prompt(target, 1), 12).wait()
        until(lambda: sum(engine.audit.verdicts.values()) == 4)
        assert engine.audit.verdicts["lossy"] == 3
        assert engine.audit.verdicts["identical"] + engine.audit.verdicts["near_tie"] == 1


def test_its_record_says_lossy_and_teaches_nothing(target: Target) -> None:
    with running(target, first_layers(target, layers=1)) as engine:
        lossy = ask(engine, random_prompt(target, 6), 40, Policy(0.8), typical=RULE)
        plainly = ask(engine, random_prompt(target, 6), 40, Policy(0.8), typical=RULE, draft_length=0)
        exactly = ask(engine, random_prompt(target, 6), 40, Policy(0.8))
        for client in (lossy, plainly, exactly):
            client.wait()
    records = [record_of(client.generation, Origin("t", "k", "d")) for client in (lossy, plainly, exactly)]
    assert [(r.lossless, r.policy) for r in records] == [(False, "t0.8 lossy"), (False, "t0.8 lossy"), (True, "t0.8")]
    assert [r.teacher.positions == b"" for r in records] == [True, True, False]


def test_the_floor_under_a_new_version_does_not_see_it(target: Target) -> None:
    with running(target, first_layers(target, layers=2)) as engine:
        engine.swap(2, first_layers(target, layers=1), guarded=True).result(timeout=30)
        ask(engine, random_prompt(target, 2), 40, HOT, typical=RULE).wait()
        floor = engine.lanes._residents.lane().floor  # type: ignore[union-attr]
        assert floor._trial is not None
        assert floor._trial.rounds == 0
        ask(engine, random_prompt(target, 2), 40, HOT).wait()
        assert floor._trial.rounds > 0


def test_the_governor_knows_it_as_a_class_of_its_own(target: Target) -> None:
    row = row_of(target, [1, 2, 3])
    row.generation.policy, row.generation.workload = Policy(0.8), "sql"
    assert class_of(row) == RowClass("sql", "t0.8")
    row.generation.typical = RULE
    assert class_of(row) == RowClass("sql", "t0.8 lossy", lossless=False)


def test_what_is_accepted_leniently_says_nothing_of_other_classes() -> None:
    seen, other = Survival(4), RowClass("chat", "t0.8")
    before = seen.expected(other)
    for _ in range(50):
        seen.see(RowClass("sql", "t0.8 lossy", lossless=False), 4, 4)
    assert seen.expected(other) == before
    seen.see(RowClass("sql", "t0.8"), 4, 0)
    assert seen.expected(other) < before


def test_trees_are_fitted_to_what_was_accepted_exactly(target: Target) -> None:
    with running(target, first_layers(target, layers=2), tree_nodes=10, draft_length=4) as engine:
        ask(engine, random_prompt(target, 2), 40, HOT, typical=RULE).wait()
        assert not engine._speculation._pace._ranks._workloads
        ask(engine, random_prompt(target, 2), 40, HOT).wait()
        assert engine._speculation._pace._ranks._workloads


def test_a_swap_between_two_of_its_rounds_is_as_any(target: Target) -> None:
    with running(target, first_layers(target, layers=1), tree_nodes=10, draft_length=4) as engine:
        clients = [ask(engine, random_prompt(target, seed), 60, HOT, typical=RULE) for seed in range(3)]
        for number in range(2, 6):
            engine.swap(number, first_layers(target, layers=1 + number % 3, seed=number)).result(timeout=30)
        assert all(len(client.wait()) > 0 for client in clients)
        assert engine.lanes.faults == 0
