"""Routing's decisions: the regret bound by simulation, no flapping, following a change, and who needs a drafter."""

import random
from collections.abc import Callable, Sequence
from math import log

import pytest

from adapter.routing import (
    ERRORS,
    GAP,
    ODDS,
    RATE,
    SHARE,
    Scored,
    averaged,
    bound,
    choice,
    entered,
    followed,
    lagging,
    loss,
    mixed,
    own_name,
    revised,
)
from storage.standings import Score, Standing

NAMES = ("general", "a", "b", "c")


def regret(losses: Sequence[dict[str, float]], best: Sequence[str], share: float, rate: float = 0.3) -> float:
    """How much the weights lose on the sequence `best` of drafters."""
    weights = entered({}, list(losses[0]))
    total = 0.0
    for lost, name in zip(losses, best, strict=True):
        total += mixed(weights, lost) - lost[name]
        weights = followed(weights, lost, rate, share)
    return total


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_weights_lose_no_more_than_the_bound_on_the_best_drafter(seed: int, rate: float) -> None:
    chance = random.Random(seed)
    spread = {name: chance.random() for name in NAMES}
    losses = [{name: float(chance.random() < spread[name]) for name in NAMES} for _ in range(1500)]
    best = min(NAMES, key=lambda name: sum(lost[name] for lost in losses))
    assert regret(losses, [best] * 1500, share=0.0, rate=rate) <= bound(4, 1500, rate=rate, share=0.0)


def test_losses_chosen_against_the_weights_stay_within_the_bound() -> None:
    """The adversary gives the heaviest drafter the loss: the bound is nearly reached."""
    weights, lost, mine = entered({}, NAMES), dict.fromkeys(NAMES, 0.0), 0.0
    for _ in range(1500):
        heaviest = max(NAMES, key=lambda name: weights[name])
        losses = {name: float(name == heaviest) for name in NAMES}
        mine += mixed(weights, losses)
        lost = {name: lost[name] + losses[name] for name in NAMES}
        weights = followed(weights, losses, share=0.0)
    worst = mine - min(lost.values())
    assert 0 < worst <= bound(4, 1500, share=0.0)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_best_drafter_that_changes_they_stay_within_the_bound_of_the_share(seed: int) -> None:
    chance, losses, best = random.Random(seed), [], []
    for segment in ("a", "b", "general", "c"):
        for _ in range(500):
            good = {name: 0.3 if name == segment else 0.7 for name in NAMES}
            losses.append({name: min(1.0, max(0.0, chance.gauss(mean, 0.2))) for name, mean in good.items()})
            best.append(segment)
    with_share, without = regret(losses, best, share=0.001), regret(losses, best, share=0.0)
    assert with_share <= bound(4, 2000, changes=3)
    assert with_share < without


def test_weights_sum_to_one_and_equal_losses_move_nothing() -> None:
    weights = {"general": 0.7, "a": 0.2, "b": 0.1}
    moved = followed(weights, dict.fromkeys(weights, 0.6), share=0.0)
    assert moved == pytest.approx(weights)
    assert sum(followed(weights, {"general": 0.9, "a": 0.1, "b": 0.4}).values()) == pytest.approx(1.0)


def test_a_drafter_that_was_not_scored_sleeps() -> None:
    weights = {"general": 0.4, "a": 0.4, "b": 0.2}
    moved = followed(weights, {"general": 0.9, "a": 0.1}, share=0.0)
    assert moved["b"] == pytest.approx(0.2)
    assert moved["a"] > 0.4 > moved["general"]


def test_a_new_drafter_enters_with_an_equal_part_and_one_that_went_leaves_its_to_the_others() -> None:
    assert entered({}, ["a", "b"]) == {"a": 0.5, "b": 0.5}
    assert entered({"a": 0.9, "b": 0.1}, ["a", "b", "c"]) == pytest.approx({"a": 0.6, "b": 0.2 / 3, "c": 1 / 3})
    assert entered({"a": 0.6, "b": 0.2, "c": 0.2}, ["a", "b"]) == pytest.approx({"a": 0.75, "b": 0.25})


def test_a_draft_step_costs_what_it_takes_of_a_target_pass() -> None:
    assert loss(0.7) == pytest.approx(0.3)
    assert loss(0.7, cost=0.2) == pytest.approx(0.5)
    assert loss(0.1, cost=0.5) == 1.0
    assert loss(1.0, cost=-0.5) == 0.0


def test_the_better_but_dearer_drafter_is_not_preferred_where_it_does_not_pay() -> None:
    requests = [Scored("sql", "greedy", {"general": 0.6, "a": 0.7})] * 400
    versions = {"general": 1, "a": 1}
    free = revised({}, requests, versions, {})
    dear = revised({}, requests, versions, {"general": 0.05, "a": 0.3})
    assert choice(free, "general", "general") is not None
    assert choice(dear, "general", "general") is None


def test_standings_count_requests_by_policy() -> None:
    first = [Scored("sql", "greedy", {"general": 0.4, "a": 0.6}), Scored("sql", "sampled", {"general": 0.9})]
    found = revised({}, first, {"general": 2, "a": 5}, {})
    assert (found["general"].scored, found["a"].scored) == (2, 1)
    assert (found["general"].version, found["a"].version) == (2, 5)
    assert found["general"].scores == {"greedy": Score(1.0, 0.4, 0.0), "sampled": Score(1.0, 0.9, 0.0)}
    later = revised(found, [Scored("sql", "greedy", {"general": 0.6})], {"general": 3}, {})
    assert later["general"].scores["greedy"].mean == pytest.approx(0.5)
    assert later["general"].scores["greedy"].variance == pytest.approx(0.01)
    assert (later["general"].version, later["general"].scored) == (3, 3)
    assert later["a"].scores == found["a"].scores


def test_an_average_forgets_slowly() -> None:
    score = None
    for _ in range(1000):
        score = averaged(score, 0.2)
    for _ in range(1500):
        score = averaged(score, 0.8)
    assert score is not None
    assert score.mean == pytest.approx(0.8, abs=0.05)


def standing(weight: float, scored: int = 300) -> Standing:
    return Standing(1, weight, {"greedy": Score(float(scored), 0.5, 0.01)}, scored)


def test_a_route_changes_only_at_the_odds_and_the_reason_has_the_figures() -> None:
    assert choice({"general": standing(0.12), "a": standing(0.88)}, "general", "general") is None
    found = choice({"general": standing(0.08), "a": standing(0.92)}, "general", "general")
    assert found is not None
    assert found.drafter == "a"
    assert "weight 0.920 against 0.080 of general after 300 requests" in found.reason
    assert choice({"general": standing(0.88), "a": standing(0.12)}, "a", "general") is None
    back = choice({"general": standing(0.92), "a": standing(0.08)}, "a", "general")
    assert back is not None
    assert back.drafter == "general"


def test_the_general_drafter_is_the_floor() -> None:
    """One that beats the serving drafter, but not the general one, is not routed to."""
    found = choice({"general": standing(0.3), "a": standing(0.02), "b": standing(0.68)}, "a", "general")
    assert found is not None
    assert found.drafter == "general"
    assert choice({"general": standing(0.1), "a": standing(0.1), "b": standing(0.8)}, "a", "general") is None


def test_without_figures_of_both_nothing_changes() -> None:
    assert choice({"a": standing(1.0)}, "general", "general") is None
    assert choice({"a": standing(1.0)}, "a", "general") is None


def changes(probabilities: Callable[[int], dict[str, float]], requests: int) -> list[int]:
    """The requests at which the route of one workload changed."""
    serving, weights, found = "general", entered({}, list(probabilities(0))), []
    for number in range(requests):
        weights = followed(weights, {name: loss(p) for name, p in probabilities(number).items()})
        standings = {name: Standing(1, weight, {}, number) for name, weight in weights.items()}
        if (made := choice(standings, serving, "general")) is not None:
            serving = made.drafter
            found.append(number)
    return found


def noisy(chance: random.Random, **means: float) -> dict[str, float]:
    """Both drafters on one request: paired differences of a standard deviation of 0.1."""
    return {name: min(1.0, max(0.0, chance.gauss(mean, 0.1 / 2**0.5))) for name, mean in means.items()}


def test_equally_good_drafters_do_not_take_turns() -> None:
    chance = random.Random(1)
    assert changes(lambda n: noisy(chance, general=0.6, a=0.6), 60_000) == []


@pytest.mark.parametrize(("better", "most"), [(0.1, 110), (0.03, 600)])
def test_a_better_drafter_is_found_and_kept(better: float, most: int) -> None:
    for seed in range(5):
        chance = random.Random(seed)
        found = changes(lambda n, c=chance: noisy(c, general=0.6, a=0.6 + better), 5000)  # type: ignore[misc]
        assert len(found) == 1
        assert found[0] < most


def test_a_trifle_is_not_told_apart() -> None:
    chance = random.Random(2)
    assert changes(lambda n: noisy(chance, general=0.6, a=0.605), 10_000) == []


def test_a_change_is_followed() -> None:
    """The specialist is better by 0.1, then worse by as much."""
    chance = random.Random(3)
    found = changes(lambda n: noisy(chance, general=0.6, a=0.7 if n < 3000 else 0.5), 6000)
    assert len(found) == 2
    assert 3000 < found[1] < 3350


@pytest.mark.parametrize("better", [0.1, 0.3, 1.0])
def test_until_the_route_follows_a_change_costs_what_is_stated(better: float) -> None:
    poor, good = (1 - better) / 2, (1 + better) / 2
    found = changes(lambda n: {"general": poor, "a": good} if n < 3000 else {"general": good, "a": poor}, 6000)
    assert len(found) == 2
    assert (found[1] - 3000) * better < 1.25 * (log(2 / SHARE) + log(ODDS)) / RATE


def of(mean: float, requests: float = 200.0, variance: float = 0.02, policy: str = "greedy") -> Standing:
    return Standing(1, 1.0, {policy: Score(requests, mean, variance)}, int(requests))


def test_a_workload_on_which_the_general_drafter_is_clearly_worse_lags() -> None:
    reason = lagging("sql", {"sql": of(0.4), "chat": of(0.6), "code": of(0.7)})
    assert reason.startswith("acceptance probability of the general drafter is 0.400 on sql and 0.650 on the other")
    assert "200 and 400 requests" in reason


def test_a_small_gap_or_an_uncertain_one_is_none() -> None:
    assert lagging("sql", {"sql": of(0.6 - GAP / 2), "chat": of(0.6)}) == ""
    unsure = of(0.5, requests=5, variance=0.04)  # a standard error of 0.09
    assert ERRORS * 0.09 > 0.1
    assert lagging("sql", {"sql": unsure, "chat": of(0.6)}) == ""


def test_a_workload_is_compared_with_others_under_the_same_policy_only() -> None:
    assert lagging("sql", {"sql": of(0.4)}) == ""
    assert lagging("sql", {"sql": of(0.4), "chat": of(0.9, policy="sampled")}) == ""
    assert lagging("sql", {"sql": Standing(1, 1.0, {}, 0), "chat": of(0.9)}) == ""


def test_workloads_alike_are_seldom_taken_for_lagging() -> None:
    chance, taken = random.Random(4), 0
    for _ in range(300):
        scores = {}
        for name in ("sql", "chat", "code"):
            score = None
            for _ in range(200):
                score = averaged(score, chance.gauss(0.6, 0.2))
            assert score is not None
            scores[name] = Standing(1, 1.0, {"greedy": score}, 200)
        taken += any(lagging(name, scores) for name in scores)
    assert taken <= 3


def test_a_workloads_own_drafter_has_a_name_that_is_free_and_safe() -> None:
    assert own_name("chat", "spider_sql", []) == "chat--spider_sql"
    assert own_name("chat", "Größe/../x y", []) == "chat--gr--e-..-x-y"
    assert own_name("chat", "sql", ["chat--sql", "chat--sql-2"]) == "chat--sql-3"
    assert len(own_name("chat", "x" * 500, [])) < 60
