"""Which rounds with n-gram matches first there are, and whose matches count."""

import pytest

from adapter.drafters.protocol import Shape
from service.engine.lookups import SURE, Lookup, Match, lookups, match_of

CHAIN = Shape.chain(8)


def test_they_are_a_chain_and_as_many_tokens_as_are_nearly_free() -> None:
    """Each alone and beside drafters."""
    assert [(one.shape.depth, one.shape.nodes) for one in lookups(4)] == [(4, 4), (14, 15)] * 2
    assert [one.shape.depth for one in lookups(20)] == [20] * 2
    assert [one.own for one in lookups(4)] == [0, 0, 4, 4]
    assert lookups(0) == ()


def test_short_matches_go_before_plain_decoding_and_only_long_ones_before_a_drafter() -> None:
    alone, beside = Lookup(CHAIN, 0), Lookup(CHAIN, 4)
    assert [alone.takes(match_of(tokens)) for tokens in (0, 2, SURE)] == [False, True, True]
    assert [beside.takes(match_of(tokens)) for tokens in (0, 2, SURE)] == [False, False, True]


@pytest.mark.parametrize(
    ("matches", "alone", "beside"),
    [
        ({"none"}, False, False),
        ({"short"}, True, False),
        ({"long"}, True, False),
        ({"short", "none"}, True, False),
        ({"long", "none"}, True, True),
    ],
)
def test_a_choice_that_is_another_one_by_another_name_is_none(matches: set[Match], alone: bool, beside: bool) -> None:
    assert (Lookup(CHAIN, 0).fits(matches), Lookup(CHAIN, 4).fits(matches)) == (alone, beside)
