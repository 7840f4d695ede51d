"""The floor right after a swap: nonsense is out within 20 rounds, and what is merely worse or unlucky is not."""

import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from service.engine.floor import Broken, Floor, FloorConfig, Proposed, likely
from service.engine.survival import RowClass
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running

CODE = RowClass("code", "greedy")


def swapped(known: float = 0.7, rounds: int = 200) -> Floor:
    """A floor after a promotion from version 1, whose tokens were accepted with this probability, to version 2."""
    floor = Floor(FloorConfig())
    floor.swapped(1, 0, guarded=False)
    play(floor, 1, known, rounds)
    floor.swapped(2, 1, guarded=True)
    return floor


def play(floor: Floor, version: int, p: float, rounds: int, seed: int = 0, requests: int = 1) -> int:
    """Rounds of four proposals until the floor says something; how many were played."""
    generator = np.random.default_rng(seed)
    for n in range(rounds):
        accepted = int(np.append(generator.random(4) >= p, True).argmax())
        if floor.note([Proposed(f"r{n % requests}", CODE, version, 4, accepted)]) is not None:
            return n + 1
    return rounds


def test_a_version_that_gets_nothing_accepted_is_taken_back_within_20_rounds() -> None:
    floor = swapped()
    assert play(floor, 2, 0.0, 100) == 16
    assert floor.broken == Broken(
        2, "below the floor right after the swap: acceptance length 1.00 in its first 16 rounds, under 1.05"
    )


def test_so_it_is_where_its_predecessor_was_not_seen() -> None:
    floor = Floor(FloorConfig())
    floor.swapped(2, 0, guarded=True)
    assert play(floor, 2, 0.0, 100) <= 20


def test_a_version_as_good_as_its_predecessor_stays() -> None:
    """A hundred promotions of each kind of drafter, the first 256 rounds of a single request."""
    for p in (0.15, 0.3, 0.7):
        blamed = [play(swapped(p), 2, p, 300, seed) < 300 for seed in range(100)]
        assert sum(blamed) <= 2, p


def test_a_version_of_less_than_half_the_length_is_taken_back_when_several_requests_say_so() -> None:
    floor = swapped(0.9)
    assert play(floor, 2, 0.2, 300, requests=5) < 60
    assert floor.broken is not None
    assert "of 5 requests, under 0.5 of its predecessor's 4." in floor.broken.reason
    one_odd_request = swapped(0.9)
    assert play(one_odd_request, 2, 0.2, 300) == 300


def test_a_short_draft_length_is_no_fall() -> None:
    """The predecessor proposed four tokens a round, the new version one: of that, as much is accepted."""
    floor, generator = swapped(0.9), np.random.default_rng(1)
    for n in range(200):
        floor.note([Proposed(f"r{n % 5}", CODE, 2, 1, int(generator.random() < 0.9))])
    assert floor.broken is None


def test_traffic_of_which_the_predecessor_could_make_nothing_either_is_not_blamed_on_the_new_version() -> None:
    floor = swapped(0.02)
    play(floor, 2, 0.0, 100)
    assert floor.broken is None


def test_after_its_first_rounds_a_version_is_left_to_the_watch() -> None:
    floor = swapped()
    play(floor, 2, 0.7, 256)
    play(floor, 2, 0.0, 300)
    assert floor.broken is None


def test_a_version_that_was_gone_back_to_is_not_judged() -> None:
    floor = swapped()
    floor.swapped(1, 2, guarded=False)
    play(floor, 1, 0.0, 100)
    assert floor.broken is None


@pytest.mark.parametrize(("hits", "rounds", "share"), [(0, 16, 0.25), (3, 20, 0.5), (20, 20, 0.3)])
def test_the_chance_of_few_hits_is_the_binomials(hits: int, rounds: int, share: float) -> None:
    from scipy.stats import binom

    assert likely(hits, rounds, share) == pytest.approx(binom.cdf(hits, rounds, share))


def shuffled(target: Target) -> CausalLM:
    """A drafter whose head names other tokens than it means."""
    broken = first_layers(target, layers=2)
    with torch.no_grad():
        order = torch.randperm(len(broken.head.weight), generator=torch.Generator().manual_seed(0))
        broken.head.weight.copy_(broken.head.weight[order].clone())
    return broken


@pytest.mark.parametrize("holdback", [0.0, 0.2])
def test_the_engine_goes_back_by_itself_and_no_token_changes(target: Target, holdback: float) -> None:
    prompts = [random_prompt(target, seed) for seed in range(12)]
    with running(target, first_layers(target, layers=2), slots=4) as engine:
        before = [ask(engine, prompt) for prompt in prompts]
        [client.wait() for client in before]
        engine.swap(2, shuffled(target), holdback, guarded=True).result(timeout=30)
        after = [ask(engine, prompt) for prompt in prompts]
        outputs = [client.wait() for client in after]
        assert engine.lanes.broken() is not None
        assert engine.lanes.version() == (1 if holdback else 0)
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]
    rounds = [r for client in after for r in client.usage.rounds if r.version == 2]
    assert 0 < len(rounds) < 20 + 4


def test_a_new_version_that_raises_errors_is_gone_back_from(target: Target) -> None:
    prompts = [random_prompt(target, seed) for seed in range(6)]
    broken = first_layers(target, layers=2)
    with running(target, first_layers(target, layers=2), slots=4) as engine:
        engine.swap(2, broken, 0.2, guarded=True).result(timeout=30)
        broken.head.forward = None
        outputs = [client.wait() for client in [ask(engine, prompt) for prompt in prompts]]
        broken_one = engine.lanes.broken()
        assert broken_one is not None
        assert broken_one.reason.startswith("failed right after the swap, after 0 rounds")
        assert engine.lanes.version() == 1
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]
