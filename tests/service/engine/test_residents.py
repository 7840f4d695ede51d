"""Two versions of a drafter at once: the live one, and the one before, on which a share of the requests stays."""

from adapter.policy import Policy
from adapter.target import Target
from service.engine.floor import FloorConfig
from service.engine.residents import Lane, Resident, share_of
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running


def test_rows_of_two_versions_in_one_batch_change_no_token(target: Target) -> None:
    prompts = [random_prompt(target, seed, 5 + seed) for seed in range(12)]
    with running(target, first_layers(target, layers=2), slots=6) as engine:
        engine.swap(2, first_layers(target, layers=1), holdback=0.5).result(timeout=30)
        clients = [ask(engine, p, draft_length=(None, 2, 0)[i % 3]) for i, p in enumerate(prompts)]
        outputs = [client.wait() for client in clients]
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]
    for client in clients:
        expected = 1 if share_of(client.generation.request_id) < 0.5 else 2
        assert {r.version for r in client.usage.rounds} <= {expected}
    assert {r.version for client in clients for r in client.usage.rounds} == {1, 2}


def test_sampled_and_seeded_rows_of_two_versions_share_a_batch(target: Target) -> None:
    policy = Policy(temperature=1.0)
    with running(target, first_layers(target, layers=2), slots=6) as engine:
        alone = ask(engine, random_prompt(target, 1), policy=policy, seed=3).wait()
        engine.swap(2, first_layers(target, layers=1), holdback=0.5).result(timeout=30)
        clients = [ask(engine, random_prompt(target, 1), policy=policy, seed=[None, 3][i % 2]) for i in range(12)]
        outputs = [client.wait() for client in clients]
    assert all(output == alone for output in outputs[1::2])


def test_a_predecessor_that_fails_costs_no_request_and_not_the_live_version(target: Target) -> None:
    broken = first_layers(target, layers=2)
    prompts = [random_prompt(target, seed) for seed in range(8)]
    with running(target, broken, slots=4) as engine:
        engine.swap(2, first_layers(target, layers=1), holdback=0.5).result(timeout=30)
        broken.head.forward = None
        outputs = [client.wait() for client in [ask(engine, prompt) for prompt in prompts]]
        assert (engine.lanes.faults, engine.lanes.version()) == (1, 2)
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]


def lane(target: Target, *swaps: tuple[int, float]) -> Lane:
    """A lane after these swaps: (version, holdback)."""
    made = Lane("", FloorConfig())
    for version, holdback in swaps:
        made.swap(Resident(version, first_layers(target)), holdback, guarded=False)
    return made


def test_the_next_swap_ends_the_holdback(target: Target) -> None:
    assert [r.version for r in lane(target, (1, 0.0), (2, 1.0), (3, 0.0)).all()] == [3]


def test_the_share_of_the_one_before_can_be_changed_and_let_go(target: Target) -> None:
    served = lane(target, (1, 0.0), (2, 0.9))
    assert served.most.version == 1
    served.hold(0.1)
    assert served.most.version == 2
    assert {served.of(f"r{n}").version for n in range(100)} == {1, 2}
    served.hold(0.0)
    assert [r.version for r in served.all()] == [2]


def test_a_lane_can_go_back_to_the_one_before_without_a_swap(target: Target) -> None:
    served = lane(target, (1, 0.0), (2, 0.9))
    before = served.most
    served.hold(1.0)
    assert served.all() == [before]  # with its memory as it was
    served.hold(1.0)
    assert [r.version for r in served.all()] == [1]
