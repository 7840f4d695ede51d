"""Proposals with remembered keys and values equal those from scratch, whatever happens to the rows, and nothing is
read twice that need not be.
"""

import random

import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from service.hosts.vllm.drafting import Asked, Bounds, Drafting, made_ready
from tests.service.engine.oracle import first_layers
from tests.service.hosts.vllm.engine import chain_after, said_by

K = 3


@pytest.fixture(scope="module")
def drafter(target: Target) -> CausalLM:
    return first_layers(target, layers=1, vocabulary=200, seed=3)


def drafting(drafter: CausalLM, rows: int = 4, reading: int = 10_000, gib: float = 1.0, context: int = 200) -> Drafting:
    bounds = Bounds(rows, context, K, reading, round(gib * 2**30))
    return made_ready(1, drafter.twin(), bounds)[1]


def asked(text: list[int], length: int = K) -> Asked:
    return Asked(np.array(text, dtype=np.int32), length)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=length)


def test_proposals_equal_those_from_scratch_while_rows_grow_move_leave_and_come_back(drafter: CausalLM) -> None:
    chance = random.Random(5)
    under_test = drafting(drafter, rows=4)
    begins = {name: prompt(name, 5 + 3 * name) for name in range(6)}
    says = {name: said_by(drafter, begins[name], 60, seed=name) for name in begins}
    grown = dict.fromkeys(begins, 1)
    for _ in range(40):
        rows = chance.sample(sorted(begins), chance.randint(1, 4))  # another order, some gone, some back
        texts = [begins[name] + says[name][: grown[name]] for name in rows]
        chains = under_test.propose([asked(text) for text in texts])
        for name, text, chain in zip(rows, texts, chains, strict=True):
            assert chain == chain_after(drafter, text, K)
            accepted = next((i for i, t in enumerate(chain) if t != says[name][grown[name] + i]), K)
            grown[name] = min(grown[name] + accepted + 1, 50)


def test_a_row_that_goes_on_reads_only_what_was_not_proposed_to_it(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    text = prompt(1, 40)
    (chain,) = under_test.propose([asked(text)])
    assert under_test.read == 40
    text += [*chain[:1], 7]  # one accepted, one recovered
    (chain,) = under_test.propose([asked(text)])
    assert under_test.read == 41  # the recovered token alone
    text += [*chain, 9]  # all accepted, and a bonus: the last proposed token was never read
    under_test.propose([asked(text)])
    assert under_test.read == 43


def test_a_row_is_found_again_at_another_place_in_the_batch_after_steps_without_it(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    one, other = prompt(1, 40), prompt(2, 30)
    under_test.propose([asked(one), asked(other)])
    under_test.propose([asked([*other, 3])])
    read = under_test.read
    (_, chain) = under_test.propose([asked([*other, 3, 4]), asked([*one, 5])])
    assert under_test.read == read + 2
    assert chain == chain_after(drafter, [*one, 5], K)


def test_a_new_row_takes_over_what_another_one_holds_of_the_same_text(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    system = prompt(1, 60)
    under_test.propose([asked([*system, 1, 2, 3])])
    read = under_test.read
    chains = under_test.propose([asked([*system, 1, 2, 3, 4]), asked([*system, 8, 9])])
    assert under_test.read == read + 1 + 2
    assert chains[1] == chain_after(drafter, [*system, 8, 9], K)
    assert chains[0] == chain_after(drafter, [*system, 1, 2, 3, 4], K)


def test_a_row_that_is_rolled_back_proposes_as_from_scratch(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    text = prompt(4, 50)
    under_test.propose([asked(text)])
    assert under_test.propose([asked(text[:30])])[0] == chain_after(drafter, text[:30], K)
    assert under_test.read == 51


def test_equal_rows_side_by_side_each_go_their_own_way(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    twin = prompt(6, 25)
    first, second = under_test.propose([asked(twin), asked(twin)])
    assert first == second
    chains = under_test.propose([asked([*twin, 1]), asked([*twin, 2])])
    assert chains == [chain_after(drafter, [*twin, 1], K), chain_after(drafter, [*twin, 2], K)]


def test_a_long_text_is_read_over_several_steps_and_others_propose_meanwhile(drafter: CausalLM) -> None:
    under_test = drafting(drafter, reading=40)
    short, long = prompt(1, 10), prompt(2, 150)
    steps = 0
    while True:
        steps += 1
        short.append(steps)
        chains = under_test.propose([asked(long), asked(short)])
        assert chains[1] == chain_after(drafter, short, K)
        if chains[0]:
            break
        long.append(steps)
    assert chains[0] == chain_after(drafter, long, K)
    assert steps in (5, 6)


def test_rows_that_the_memory_has_no_room_for_get_no_proposal_and_others_do(drafter: CausalLM) -> None:
    each = 2 * 2 * 8 * 4  # bytes a position: keys and values of two heads of eight numbers in fp32
    under_test = drafting(drafter, rows=4, gib=3 * 203 * each / 2**30)  # two rows, and one to move with
    texts = [prompt(n, 20) for n in range(3)]
    chains = under_test.propose([asked(text) for text in texts])
    assert [bool(chain) for chain in chains] == [True, True, False]
    assert under_test.homeless == 1
    assert under_test.propose([asked(texts[2])])[0] == chain_after(drafter, texts[2], K)  # the others left


def test_a_row_that_wants_less_gets_less_and_one_that_wants_nothing_stays_known(drafter: CausalLM) -> None:
    under_test = drafting(drafter)
    one, other = prompt(1, 20), prompt(2, 30)
    chains = under_test.propose([asked(one, 1), asked(other, 0)])
    assert chains == [chain_after(drafter, one, 1), []]
    assert under_test.propose([asked([*one, 4]), asked([*other, 5])])[1] == chain_after(drafter, [*other, 5], K)


def test_the_memory_grows_with_the_rows(drafter: CausalLM) -> None:
    under_test = drafting(drafter, rows=32)
    texts = [prompt(n, 5 + n) for n in range(24)]
    for count in (1, 9, 24):
        chains = under_test.propose([asked(text) for text in texts[:count]])
        assert chains == [chain_after(drafter, text, K) for text in texts[:count]]
        texts = [[*text, 3] for text in texts]


def test_rows_that_left_are_forgotten_before_the_memory_grows_for_new_ones(drafter: CausalLM) -> None:
    under_test = drafting(drafter, rows=64)
    for n in range(40):
        assert under_test.propose([asked(prompt(n, 12))])[0] == chain_after(drafter, prompt(n, 12), K)
    assert len(under_test._memory._places) <= 8


def test_weights_are_packed_and_the_drafter_has_proposed_before_it_serves(drafter: CausalLM) -> None:
    resident, _ = made_ready(4, drafter.twin(), Bounds(2, 100, K, 100, 2**20))
    assert resident.version == 4
    assert resident.drafter is not None
    assert not any(type(module) is torch.nn.Linear for module in resident.drafter.modules())  # type: ignore[attr-defined]
