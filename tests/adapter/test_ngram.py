"""Proposals out of what was said before: in the row's own text, and in recent outputs of its workload."""

import random
from array import array

import pytest
import torch

from adapter.drafters.ngram import Ngram, repeated
from adapter.drafters.protocol import DraftRow, Proposal, Shape
from adapter.drafters.recent import TOKEN_BYTES, Match, Recent
from adapter.drafters.tree import path
from adapter.policy import Policy
from adapter.sampling import Sampler

SIZE = 100
CHAIN = Shape.chain(4)


def row(text: list[int], workload: str = "w", length: int = 4) -> DraftRow:
    return DraftRow(text, 0, length, Sampler(Policy(0.0), text[:1], []), None, workload)


def proposed(drafter: Ngram, *rows: DraftRow, shape: Shape = CHAIN) -> list[list[int]]:
    made = drafter.propose(None, list(rows), shape)
    assert made.lengths is not None
    return [tokens[:n] for tokens, n in zip(made.tokens.tolist(), made.lengths, strict=True)]


def drafter(recent: Recent | None = None) -> Ngram:
    return Ngram(SIZE, torch.device("cpu"), recent)


def test_what_followed_the_same_tokens_before_is_proposed() -> None:
    assert proposed(drafter(), row([1, 2, 3, 4, 5, 6, 9, 2, 3])) == [[4, 5, 6, 9]]


def test_the_longest_match_goes_before_the_latest() -> None:
    assert proposed(drafter(), row([7, 1, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3])) == [[50, 8, 2, 3]]


def test_a_repetition_goes_on() -> None:
    assert proposed(drafter(), row([9, 1, 2, 1, 2])) == [[1, 2, 1, 2]]
    assert repeated([5, 6, 7], 1, 5) == [6, 7, 6, 7, 6]


def test_without_a_match_nothing_is_proposed_and_others_in_the_batch_are() -> None:
    assert proposed(drafter(), row([1, 2, 3]), row([4, 5, 8, 4, 5]), row([6])) == [[], [8, 4, 5, 8], []]


@pytest.mark.parametrize("shape", [CHAIN, Shape(3, 7, 3)], ids=["chain", "tree"])
def test_a_batch_without_a_match_gets_a_proposal_of_no_tokens(shape: Shape) -> None:
    made = drafter().propose(None, [row([1, 2, 3]), row([4])], shape)
    assert (made.tokens.shape, made.lengths, made.tokens.dtype) == ((2, 0), [0, 0], torch.long)
    assert made.parents is None or (made.parents.shape, made.parents.dtype) == ((2, 0), torch.long)


def test_a_row_wants_no_more_than_its_draft_length() -> None:
    assert proposed(drafter(), row([1, 2, 3, 4, 5, 6, 9, 2, 3], length=2)) == [[4, 5]]


def test_a_text_that_grows_is_looked_at_once() -> None:
    ngram, text = drafter(), row([1, 2, 3])
    sampler, sequence = text.sampler, text.pending
    for token in (1, 2):
        sequence.append(token)
        made = ngram.propose(None, [DraftRow(sequence, 0, 4, sampler)], Shape.chain(4))
    assert made.tokens.tolist() == [[3, 1, 2, 3]]
    assert ngram._own[sampler]._noted == len(sequence)


def test_a_finished_rows_text_is_forgotten() -> None:
    ngram, text = drafter(), row([1, 2, 3])
    proposed(ngram, text)
    assert len(ngram._own) == 1
    del text
    assert len(ngram._own) == 0


def test_continuations_that_part_make_a_tree() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 8, 7, 6, 1, 2]
    made = drafter().propose(None, [row(text)], Shape(3, 7, 3))
    assert made.parents is not None
    assert made.lengths == [7]
    tokens, parents = made.tokens[0].tolist(), made.parents[0].tolist()
    ways = {tuple(path(tokens, parents, node)) for node in range(len(tokens))}
    assert {(8, 7, 6), (3, 5, 9), (3, 4)} <= ways or {(8, 7), (3, 5, 9), (3, 4, 9)} <= ways
    assert len(ways) == 7


def test_what_more_continuations_say_is_proposed_and_a_longer_match_outweighs_two_shorter() -> None:
    assert proposed(drafter(), row([1, 2, 5, 1, 2, 6, 1, 2, 6, 9, 1, 2]), shape=Shape.chain(1)) == [[6]]
    text = [8, 9, 1, 2, 5, 1, 2, 6, 1, 2, 6, 8, 9, 1, 2]
    assert proposed(drafter(), row(text), shape=Shape.chain(1)) == [[5]]


def test_a_tree_is_deep_where_all_agree_and_broad_where_they_do_not() -> None:
    agreed = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    parted = [1, 2, 3, 30, 31, 1, 2, 4, 40, 41, 1, 2, 5, 50, 51, 1, 2, 6, 60, 61, 1, 2]
    found = [drafter().propose(None, [row(text, length=6)], Shape(6, 7, 4)) for text in (agreed, parted)]
    firsts = [int((made.parents == -1).sum()) for made in found if made.parents is not None]
    assert firsts == [1, 4]
    assert [made.lengths for made in found] == [[7], [7]]


def test_recent_outputs_of_the_workload_are_looked_in_and_no_others() -> None:
    recent = Recent(1024, SIZE)
    recent.insert("w", [10, 11, 12, 13, 14, 15, 16])
    recent.insert("other", [10, 11, 12, 99, 99])
    assert proposed(drafter(recent), row([5, 10, 11, 12])) == [[13, 14, 15, 16]]
    assert proposed(drafter(recent), row([5, 10, 11, 12], workload="other")) == [[99, 99]]
    assert proposed(drafter(recent), row([5, 10, 11, 12], workload="third")) == [[]]


def test_a_longer_match_in_the_recent_outputs_goes_before_one_in_the_own_text() -> None:
    recent = Recent(1024, SIZE)
    recent.insert("w", [20, 21, 22, 23, 30])
    own = [22, 23, 40, 20, 21, 22, 23]
    assert proposed(drafter(recent), row(own), shape=Shape.chain(1)) == [[30]]


def test_an_outputs_end_is_no_continuation() -> None:
    recent = Recent(1024, SIZE)
    recent.insert("w", [1, 2, 3])
    recent.insert("w", [3, 4, 5])
    assert recent.matches("w", [1, 2, 3], 4) == []
    assert recent.matches("w", [2, 3, 3], 4) == []


def test_a_long_match_is_found_however_often_its_last_tokens_stand_elsewhere() -> None:
    recent = Recent(4096, SIZE)
    recent.insert("w", [20, 21, 22, 23, 77])
    for n in range(200):
        recent.insert("w", [n % 19, 22, 23, 50])
    assert recent.matches("w", [20, 21, 22, 23], 1)[0] == Match(4, [77])


def test_what_the_ring_has_overwritten_is_gone() -> None:
    recent = Recent(64, SIZE)
    recent.insert("w", [1, 2, 3, 4, 5])
    assert recent.matches("w", [1, 2, 3], 2)[0].tokens == [4, 5]
    recent.insert("w", [50 + i % 40 for i in range(70)])
    assert recent.matches("w", [1, 2, 3], 2) == []


def test_a_million_tokens_stay_under_the_bound() -> None:
    recent, draws = Recent(2**14, 50_000), random.Random(1)
    before = recent.bytes
    for n in range(2_000):
        recent.insert(f"w{n % 300}", [draws.randrange(50_000) for _ in range(500)])
    assert recent.bytes == before == TOKEN_BYTES * 2**14
    assert len(recent) == recent.capacity == 2**14
    kept = [*vars(recent).values(), *(value for places in recent._places for value in vars(places).values())]
    assert {type(one) for one in kept} == {array, int, tuple}  # so there is nothing else that could grow
    last = [draws.randrange(50_000) for _ in range(100)]
    recent.insert("w", last)
    assert recent.matches("w", last[40:50], 5)[0].tokens == last[50:55]


@pytest.mark.parametrize("seed", range(5))
def test_every_match_is_what_an_exhaustive_search_finds(seed: int) -> None:
    draws = random.Random(seed)
    outputs = [[draws.randrange(6) for _ in range(40)] for _ in range(8)]
    recent = Recent(1024, SIZE)
    for output in outputs:
        recent.insert("w", output)
    text = [draws.randrange(6) for _ in range(10)]
    found = recent.matches("w", text, 3)
    everywhere = [
        (n, output[at : at + 3])
        for output in outputs
        for at in range(2, len(output))
        for n in [next((n for n in range(10) if n >= at or output[at - 1 - n] != text[-1 - n]), 10)]
        if n >= 2
    ]
    assert all((match.matched, match.tokens) in everywhere for match in found)
    assert bool(found) == bool(everywhere)
    if 0 < len(everywhere) <= 24:
        assert found[0].matched == max(n for n, _ in everywhere)


def test_nothing_is_drawn() -> None:
    made: Proposal = drafter().propose(None, [row([1, 2, 3, 1, 2])], Shape.chain(4))
    assert made.drawn == ()
