"""The governor on a modelled machine with measured costs and noise, against the best that could be chosen.

Progress is scored without the noise (expected tokens, usual milliseconds), so a figure below a bound is the
governor's doing, not a draw's.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from service.engine.governor import Choice, Governor, GovernorConfig, Played, RowClass
from service.engine.lookups import NOTHING, Match
from service.engine.shapes import Shapes
from service.engine.survival import CLASSES
from tests.service.engine.machine import BF16, FP32, Machine, Table, Truth, fixed, governed

A, B, C = RowClass("a", "greedy"), RowClass("b", "greedy"), RowClass("c", "t0.8")
LIMIT = 4
SIZES = (1, 4, 8, 16)


def made(limit: int = LIMIT, **config: float) -> Governor:
    return Governor(Shapes(limit), GovernorConfig(**config))


def always(probability: float) -> Truth:
    return lambda _, row_class: probability


def best_fixed(truth: Truth, rows: Sequence[RowClass], table: Table = BF16, limit: int = LIMIT, **how: int) -> float:
    """Progress of the best single draft length, 0 included."""
    return max(fixed(Machine(truth, table, seed=99, **how), rows, k, 400) for k in range(limit + 1))


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("table", [BF16, FP32])
def test_a_useless_drafter_costs_at_most_three_percent(batch: int, table: Table) -> None:
    machine, rows = Machine(always(0.0), table, spikes=0.05), [A] * batch
    governed(machine, made(), rows, 1500)
    assert machine.total.progress >= 0.97 * fixed(Machine(always(0.0), table), rows, 0, 100)


@pytest.mark.parametrize("batch", [1, 16])
def test_nor_does_it_where_another_useless_one_is_swapped_in_every_three_hundred_rounds(batch: int) -> None:
    machine, governor, rows = Machine(always(0.02)), made(), [A] * batch
    for _ in range(5):
        governed(machine, governor, rows, 300)
        machine.swap()
        governor.rearm()
    assert machine.total.progress >= 0.97 * fixed(Machine(always(0.02)), rows, 0, 100)


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("probability", [0.4, 0.6, 0.8])
def test_a_good_drafter_gives_what_the_best_fixed_draft_length_gives(batch: int, probability: float) -> None:
    machine, rows = Machine(always(probability), spikes=0.05), [A] * batch
    governed(machine, made(), rows, 1500)
    assert machine.total.progress >= 0.97 * best_fixed(always(probability), rows)


@pytest.mark.parametrize(("batch", "probability"), [(1, 0.8), (4, 0.5), (8, 0.8), (16, 0.8)])
def test_so_it_does_on_a_machine_whose_first_token_costs_most(batch: int, probability: float) -> None:
    machine, rows = Machine(always(probability), FP32), [A] * batch
    governed(machine, made(), rows, 1500)
    assert machine.total.progress >= 0.97 * best_fixed(always(probability), rows, FP32)


def test_long_draft_lengths_are_found() -> None:
    machine = Machine(always(0.95))
    governed(machine, made(limit=15), [A], 2500)
    assert machine.total.progress >= 0.97 * best_fixed(always(0.95), [A], limit=15)


@pytest.mark.parametrize("copies", [1, 5])
def test_rows_of_unlike_workloads_get_the_draft_length_that_is_best_for_all_of_them(copies: int) -> None:
    def truth(_: int, row_class: RowClass) -> float:
        return {"a": 0.8, "b": 0.05, "c": 0.5}[row_class.workload]

    machine, rows = Machine(truth), [A, B, C] * copies
    governed(machine, made(), rows, 1500)
    assert machine.total.progress >= 0.97 * best_fixed(truth, rows)


def test_batches_of_changing_size_each_get_their_own_draft_length() -> None:
    machine, governor, ideal = Machine(always(0.3)), made(), 0.0
    best = {batch: best_fixed(always(0.3), [A] * batch) for batch in (1, 12)}
    for _ in range(30):
        for batch in best:
            before = machine.total.ms
            governed(machine, governor, [A] * batch, 40)
            ideal += best[batch] * (machine.total.ms - before)
    assert machine.total.tokens >= 0.96 * ideal  # requests join at each change, which `best` knows nothing of


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("probability", [0.6, 0.9])
def test_a_good_drafter_is_on_within_fifty_rounds_after_the_swap(batch: int, probability: float) -> None:
    machine, governor, rows = Machine(lambda r, _: 0.02 if r <= 600 else probability), made(), [A] * batch
    governed(machine, governor, rows, 600)
    machine.swap()
    governor.rearm()
    chosen = governed(machine, governor, rows, 150)
    assert sum(k > 0 for k in chosen[50:]) >= 90


@pytest.mark.parametrize(("batch", "within"), [(1, 400), (4, 200), (16, 500)])
def test_a_drafter_that_recovers_without_a_swap_is_noticed(batch: int, within: int) -> None:
    machine = Machine(lambda r, _: 0.02 if 500 < r <= 1300 else 0.8)
    governor, rows = made(), [A] * batch
    assert sum(k > 0 for k in governed(machine, governor, rows, 500)[100:]) > 350
    assert sum(k > 0 for k in governed(machine, governor, rows, 800)[600:]) < 100
    assert sum(k > 0 for k in governed(machine, governor, rows, within + 100)[within:]) > 85


@pytest.mark.parametrize(("batch", "probability"), [(1, 0.09), (4, 0.18), (8, 0.22), (16, 0.32)])
def test_near_break_even_it_does_not_flap(batch: int, probability: float) -> None:
    machine, governor, best = Machine(always(probability)), made(), []
    for _ in range(2000):
        governed(machine, governor, [A] * batch, 1)
        best.append(governor._standing.best > 0)  # what is chosen when no probe is made
    assert sum(before != after for before, after in pairwise(best)) <= 25


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.8])
def test_a_load_that_doubles_and_goes_again_changes_nothing(probability: float) -> None:
    def load(played: int) -> float:
        return 2.0 if 600 < played <= 1200 else 1.0

    machine, rows = Machine(always(probability), load=load), [A] * 8
    governed(machine, made(), rows, 1800)
    alike = [fixed(Machine(always(probability), load=load), rows, k, 1800) for k in (0, 1, 4)]
    assert machine.total.progress >= 0.97 * max(alike)


@pytest.mark.parametrize("batch", [4, 16])
def test_plain_rounds_that_were_slow_at_the_start_are_checked(batch: int) -> None:
    machine, rows = Machine(always(0.02), load=lambda r: 3.0 if r <= 3 else 1.0), [A] * batch
    chosen = governed(machine, made(), rows, 600)
    assert sum(k > 0 for k in chosen[100:]) < 60


def test_where_prompts_are_long_and_outputs_short_catching_up_counts() -> None:
    for probability in (0.4, 0.8):
        how = {"output": 16, "prompt": 400}
        machine, rows = Machine(always(probability), **how), [A] * 8
        governed(machine, made(), rows, 1500)
        assert machine.total.progress >= 0.96 * best_fixed(always(probability), rows, **how)


def test_probes_lose_no_more_than_their_share() -> None:
    lost = {}
    for share in (0.005, 0.02):
        machine, governor, rows = Machine(always(0.0)), made(probe_share=share), [A] * 4
        governed(machine, governor, rows, 300)  # the first learning
        tokens, ms = machine.total.tokens, machine.total.ms
        governed(machine, governor, rows, 2500)
        plain = fixed(Machine(always(0.0)), rows, 0, 100)
        lost[share] = 1 - (machine.total.tokens - tokens) / (machine.total.ms - ms) / plain
        assert lost[share] <= 1.3 * share
    assert lost[0.02] > 2 * lost[0.005]  # and they are made


def test_ten_thousand_workloads_take_no_more_memory_than_a_few() -> None:
    machine, governor = Machine(always(0.7)), made()
    for i in range(0, 10_000, 8):
        governed(machine, governor, [RowClass(f"w{j}", "greedy") for j in range(i, i + 8)], 1)
    assert len(governor.decisions()) <= 64
    assert len(governor._survival._chain._classes) <= CLASSES


def test_no_row_that_asks_for_its_own_draft_length_leaves_it_stuck() -> None:
    """Some row always proposes 3, so that no round is as the governor says, and none is plain."""
    machine, governor = Machine(always(0.9)), made()
    chosen = []
    for _ in range(200):
        chosen.append(governor.choose([A] * 4))
        governor.observe(machine.play([A] * 4, 3))
    assert sum(k > 0 for k in chosen) > 150
    assert len(set(chosen[100:])) > 1


def test_seeded_rows_that_are_not_played_as_sampled_do_not_leave_it_stuck() -> None:
    machine, governor = Machine(always(0.9)), made()
    chosen = []
    for _ in range(300):
        chosen.append(governor.choose([C] * 4))
        governor.observe(replace(machine.play([C] * 4, chosen[-1]), sampled=False))
    assert sum(k > 0 for k in chosen) > 250


def test_neither_choice_nor_observation_has_a_place_for_tokens() -> None:
    assert set(inspect.signature(Governor.choose).parameters) == {"self", "rows"}
    assert set(RowClass.__dataclass_fields__) == {"workload", "policy", "lossless", "match"}
    figures = {"batch", "width", "draft_ms", "verify_ms", "other_ms", "absorbed", "sampled", "rows", "by_match"}
    assert set(Played.__dataclass_fields__) == figures


def test_switched_off_it_always_gives_the_longest() -> None:
    governor = made(governor=False)
    assert [governor.choose([A]) for _ in range(10)] == [LIMIT] * 10


def decided(probability: float, batch: int, rounds: int = 600) -> Choice:
    governor = made()
    governed(Machine(always(probability)), governor, [A] * batch, rounds)
    (choice,) = governor.decisions()
    return choice


def test_a_decision_says_what_speculating_and_plain_decoding_give() -> None:
    choice = decided(0.8, 4)
    assert (choice.workload, choice.policy, choice.batch, choice.rounds) == ("a", "greedy", 4, 600)
    assert choice.draft_length == choice.speculative in (3, 4)
    assert choice.survival == pytest.approx([0.8, 0.64, 0.512, 0.41], abs=0.1)
    assert choice.plain_ms == pytest.approx(42.5, rel=0.15)
    assert choice.plain_progress == pytest.approx(4 / choice.plain_ms)
    assert choice.speculative_progress / choice.plain_progress == choice.speed_up
    assert choice.speed_up == pytest.approx(2.0, rel=0.15)


def test_a_decision_says_why() -> None:
    assert decided(0.8, 4, 606).why in ("on", "probing")
    assert decided(0.8, 4, 2).why == "learning"
    off = decided(0.0, 8, 607)
    assert off.why == f"off: plain is {1 / off.speed_up:.1f}x faster"
    assert 1.1 < 1 / off.speed_up < 1.35


def test_while_it_probes_the_decision_says_so() -> None:
    machine, governor = Machine(always(0.0)), made()
    said = set()
    for _ in range(600):
        governed(machine, governor, [A] * 4, 1)
        said.add(governor.decisions()[0].why.partition(":")[0])
    assert {"learning", "off", "probing"} <= said


def test_classes_and_batch_sizes_are_decided_apart() -> None:
    machine, governor = Machine(lambda _, row_class: 0.8 if row_class == A else 0.05), made()
    for batch in (2, 8, 2, 8):
        governed(machine, governor, [A, B] * (batch // 2), 200)
    found = {(c.workload, c.batch): c.draft_length for c in governor.decisions()}
    assert set(found) == {("a", 2), ("a", 8), ("b", 2), ("b", 8)}
    assert found["a", 8] >= 2
    assert found["b", 8] == 0


SHAPES = Shapes.of(LIMIT, 32)
TREES = SHAPES.further
WORTH = (1.6, 2.0, 2.3, 1.5, 1.8, 2.0)  # grown trees, and those of fixed form
GAINS = tuple((tree.depth, tree.nodes, gain) for tree, gain in zip(TREES, WORTH, strict=True))


def branching(probability: float, gains: Sequence[tuple[int, int, float]] = GAINS, seed: int = 0) -> Machine:
    """A machine on which trees are accepted deeper, and cost as much as so many tokens do."""
    return Machine(always(probability), seed=seed, spikes=0.05, longest=LIMIT, trees=gains)


def best_of_all(probability: float, batch: int, gains: Sequence[tuple[int, int, float]] = GAINS) -> tuple[float, int]:
    """The most progress of any choice, and which it is."""
    every = range(LIMIT + 1 + len(TREES))
    return max((fixed(branching(probability, gains, seed=99), [A] * batch, k, 400), k) for k in every)


def test_trees_double_from_eight_tokens_and_each_has_a_twin_of_fixed_form() -> None:
    assert [(tree.nodes, len(tree.form)) for tree in TREES] == [(8, 0), (16, 0), (32, 0), (8, 8), (16, 16), (32, 32)]
    assert [tree.nodes for tree in Shapes.of(4, 20).trees] == [10, 20]
    assert [tree.nodes for tree in Shapes.of(4, 6).trees] == [6]
    assert Shapes.of(4, 0).further == ()
    assert Shapes.of(4, 4).further == ()


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("probability", [0.3, 0.5, 0.8])
def test_among_trees_chains_and_plain_rounds_the_best_is_found(batch: int, probability: float) -> None:
    machine, governor = branching(probability), Governor(SHAPES, GovernorConfig())
    governed(machine, governor, [A] * batch, 2000)
    assert machine.total.progress >= 0.94 * best_of_all(probability, batch)[0]


def test_at_a_small_batch_that_is_a_tree_and_decisions_say_how_large() -> None:
    machine, governor = branching(0.6), Governor(SHAPES, GovernorConfig())
    chosen = governed(machine, governor, [A], 1500)
    assert best_of_all(0.6, 1)[1] > LIMIT
    assert sum(k > LIMIT for k in chosen[-300:]) > 250
    (decision,) = governor.decisions()
    assert decision.nodes in {tree.nodes for tree in TREES}
    assert (decision.draft_length, decision.speculative, decision.lookup) == (LIMIT, LIMIT, False)
    assert len(decision.survival) == LIMIT


def test_trees_that_accept_no_more_than_chains_cost_little() -> None:
    useless = tuple((depth, nodes, 1.0) for depth, nodes, _ in GAINS)
    machine, governor = branching(0.7, useless), Governor(SHAPES, GovernorConfig())
    governed(machine, governor, [A] * 4, 2000)
    assert machine.total.progress >= 0.94 * best_of_all(0.7, 4, useless)[0]


@pytest.mark.parametrize("batch", [1, 16])
def test_a_useless_drafter_costs_at_most_three_percent_with_trees_too(batch: int) -> None:
    machine, governor = branching(0.0), Governor(SHAPES, GovernorConfig())
    governed(machine, governor, [A] * batch, 1500)
    assert machine.total.progress >= 0.97 * fixed(branching(0.0), [A] * batch, 0, 100)


A_MATCH = replace(A, match="long")
LOOKING_UP = Shapes.of(LIMIT, 0, ngram_first=True)


def matching(drafter: float, match: float, seed: int = 0, cold: float = 1.0) -> Machine:
    """A machine on which matches are looked up."""
    return Machine(always(drafter), seed=seed, longest=LIMIT, lookups=LOOKING_UP.lookups, matched=match, cold=cold)


def best_with_matches(drafter: float, match: float, rows: Sequence[RowClass]) -> float:
    """Progress of the best single choice for rows with these matches."""
    return max(fixed(matching(drafter, match, seed=99), rows, k, 300) for k in range(LOOKING_UP.choices))


@pytest.mark.parametrize(("drafter", "match"), [(0.0, 0.85), (0.6, 0.9), (0.6, 0.3), (0.0, 0.0)])
def test_rows_with_matches_and_rows_without_each_get_what_is_best_for_them(drafter: float, match: float) -> None:
    """One request, whose text repeats itself for some rounds and then does not."""
    governor, machine, ideal = Governor(LOOKING_UP, GovernorConfig()), matching(drafter, match), 0.0
    states = [[A], [A_MATCH], [A], [replace(A, match="short")]]
    best = [best_with_matches(drafter, match, rows) for rows in states]
    for _ in range(60):
        for rows, progress in zip(states, best, strict=True):
            before = machine.total.ms
            governed(machine, governor, rows, 7)
            ideal += progress * (machine.total.ms - before)
    assert machine.total.tokens >= 0.95 * ideal


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_whose_first_round_was_slow_is_tried_again(seed: int) -> None:
    """The widest pass is the best by far, and its first one takes three times as long."""
    governor, machine, rows = Governor(LOOKING_UP, GovernorConfig()), matching(0.0, 0.9, seed, 3.0), [A_MATCH]
    lookups = [LOOKING_UP.lookup(k) for k in governed(machine, governor, rows, 100)]
    assert sum(lookup is not None and lookup.nodes == 15 for lookup in lookups) > 75


def test_in_a_batch_matches_go_first_and_the_other_rows_have_their_drafter() -> None:
    rows = [A, A_MATCH, A, A_MATCH]
    governor, machine = Governor(LOOKING_UP, GovernorConfig()), matching(0.6, 0.9)
    chosen = governed(machine, governor, rows, 1500)
    assert machine.total.progress >= 0.95 * best_with_matches(0.6, 0.9, rows)
    lookups = [LOOKING_UP.lookup(k) for k in chosen[500:]]
    assert sum(lookup is not None and (lookup.joined or lookup.own.depth > 0) for lookup in lookups) > 800


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("match", ["short", "long"])
def test_where_a_drafter_is_right_when_a_match_is_wrong_both_are_proposed(match: Match, seed: int) -> None:
    """For one request wide passes are cheap."""
    rows = [replace(A, match=match)]
    governor, machine = Governor(LOOKING_UP, GovernorConfig()), matching(0.6, 0.55, seed)
    chosen = governed(machine, governor, rows, 1500)
    assert machine.total.progress >= 0.95 * best_with_matches(0.6, 0.55, rows)
    lookups = [LOOKING_UP.lookup(k) for k in chosen[500:]]
    assert sum(lookup is not None and lookup.joined for lookup in lookups) > 900


def test_rounds_of_both_tell_what_the_match_alone_would_have_done() -> None:
    """So a match that is right by itself is found to need no drafter."""
    governor, machine, rows = Governor(LOOKING_UP, GovernorConfig()), matching(0.0, 0.85), [A_MATCH]
    joined = next(k for k in range(LOOKING_UP.choices) if (one := LOOKING_UP.lookup(k)) and one.joined)
    for _ in range(60):
        governor.observe(machine.play(rows, joined))
    lookups = [LOOKING_UP.lookup(k) for k in governed(machine, governor, rows, 100)]
    assert sum(lookup is not None and not lookup.joined for lookup in lookups) > 80


def test_a_swap_leaves_what_is_known_of_matches() -> None:
    rows = [A_MATCH]
    governor, machine = Governor(LOOKING_UP, GovernorConfig()), matching(0.0, 0.0)
    governed(machine, governor, rows, 300)
    governor.rearm()
    lookups = [LOOKING_UP.lookup(k) for k in governed(machine, governor, rows, 50)]
    assert sum(lookup is not None for lookup in lookups) <= 12


def test_what_is_not_for_rows_with_such_matches_is_never_chosen() -> None:
    governor, machine = Governor(LOOKING_UP, GovernorConfig()), matching(0.3, 0.9)
    assert all(LOOKING_UP.lookup(k) is None for k in governed(machine, governor, [A] * 4, 600))
    alone = governed(machine, governor, [replace(A, match="short")] * 4, 600)
    assert all(lookup.joined or lookup.own == NOTHING for k in alone if (lookup := LOOKING_UP.lookup(k)))


def test_a_decision_on_rows_with_matches_stands_apart_and_says_so() -> None:
    governor, machine = Governor(LOOKING_UP, GovernorConfig()), matching(0.0, 0.9)
    for rows in ([A], [A_MATCH]) * 20:
        governed(machine, governor, rows, 20)
    found = {choice.match: choice for choice in governor.decisions()}
    assert set(found) == {"none", "long"}
    assert (found["none"].draft_length, found["none"].lookup) == (0, False)
    assert (found["long"].draft_length, found["long"].lookup) == (14, True)
    assert len(found["long"].survival) == 14
