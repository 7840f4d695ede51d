"""Which rounds with n-gram matches first there are, and whose matches count."""

import pytest

from adapter.drafters.protocol import Shape
from service.engine.lookups import NOTHING, SURE, WIDEST, Lookup, Match, lookups, match_of

CHAIN = Shape.chain(8)
ALONE, BESIDE = Lookup(CHAIN), Lookup(CHAIN, Shape.chain(4))
JOINED = Lookup(CHAIN, Shape.chain(4), joined=True)


def test_they_are_a_chain_and_as_many_tokens_as_are_nearly_free() -> None:
    """Each alone and beside drafters, and both in one tree."""
    apart = [one for one in lookups(4, trees=True) if not one.joined]
    assert [(one.shape.depth, one.shape.nodes) for one in apart] == [(4, 4), (14, 15)] * 2
    assert [one.own for one in apart] == [NOTHING, NOTHING, Shape.chain(4), Shape.chain(4)]
    assert [one.shape.depth for one in lookups(20, trees=True)] == [20] * 2
    assert lookups(0, trees=True) == ()


@pytest.mark.parametrize("longest", range(1, 8))
@pytest.mark.parametrize("trees", [False, True])
def test_a_tree_of_both_is_no_wider_than_one_of_matches(longest: int, trees: bool) -> None:
    (joined,) = (one for one in lookups(longest, trees) if one.joined)
    assert joined.nodes == WIDEST
    assert joined.own.depth == longest
    assert joined.own.is_chain == (not trees or longest == 7)


def test_short_matches_count_but_where_a_drafter_would_stand_back_for_them() -> None:
    for one, taken in ((ALONE, [False, True, True]), (BESIDE, [False, False, True]), (JOINED, [False, True, True])):
        assert [one.takes(match_of(tokens)) for tokens in (0, 2, SURE)] == taken


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
    assert (ALONE.fits(matches), BESIDE.fits(matches), JOINED.fits(matches)) == (alone, beside, alone)
