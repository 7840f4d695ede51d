"""Rejection positions out of an engine's per-step counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.hosts.sidecar.rounds import Place, Steps, reconstruct

K = 4


def played(accepted: list[int], k: int = K) -> tuple[Steps, int, list[int]]:
    """A generation by such steps: what the engine says, its output's length, its rejection positions."""
    at, rejections = 1, []
    for a in accepted:
        if a < k:
            rejections.append(at + a)
        at += a + 1
    return Steps(tuple(accepted), (k,) * len(accepted), k), at, rejections


@given(st.lists(st.integers(0, K), min_size=1, max_size=30))
def test_whole_steps_give_exactly_the_engine_s_rejection_positions(accepted: list[int]) -> None:
    steps, length, rejections = played(accepted)
    found = reconstruct(steps, length)
    assert (found.grade, found.rejections) == ("exact", rejections)


@given(st.lists(st.integers(0, K), min_size=1, max_size=30), st.data())
def test_a_last_step_that_was_cut_short_is_no_rejection(accepted: list[int], data: st.DataObject) -> None:
    accepted = [*accepted, data.draw(st.integers(1, K))]
    steps, length, rejections = played(accepted)
    cut = data.draw(st.integers(1, accepted[-1]))
    found = reconstruct(steps, length - cut)
    last = length - accepted[-1] - 1
    committed = accepted[-1] + 1 - cut
    assert found.grade == "exact_truncated"
    assert found.rejections == [at for at in rejections if at < last]
    assert found.places[-1] == Place(last, committed, committed)


@given(st.lists(st.integers(0, K), min_size=1, max_size=30), st.integers(1, 3))
def test_steps_without_a_proposal_are_never_called_exact(accepted: list[int], plain: int) -> None:
    """Each of them adds a token that no step tells of. The counts stay; only the places are unsure."""
    steps, length, _ = played(accepted)
    found = reconstruct(steps, length + plain)
    assert found.grade == "approx"
    assert sum(place.accepted for place in found.places) == sum(accepted)


@given(st.lists(st.integers(0, K), min_size=1, max_size=30), st.integers(-40, 40))
def test_whatever_an_engine_says_a_record_can_hold_it(accepted: list[int], off: int) -> None:
    steps, length, _ = played(accepted)
    length = max(length + off, 1)
    end = 0
    for place in reconstruct(steps, length).places:
        assert 0 <= place.accepted <= place.proposed
        assert place.start >= end
        assert place.start + place.proposed <= length
        end = place.start + place.accepted + (place.accepted < place.proposed)


@pytest.mark.parametrize(("drafted", "bound"), [((K, K - 1), False), ((K, K), True)])
def test_short_proposals_and_bound_output_are_approximate_whatever_the_sums_say(
    drafted: tuple[int, ...], bound: bool
) -> None:
    steps = Steps((1, 2), drafted, K)
    assert reconstruct(steps, 6, bound).grade == "approx"


@pytest.mark.parametrize(("prompt", "grade"), [(129, "approx"), (17, "approx"), (128, "exact"), (130, "exact")])
def test_a_first_step_that_may_be_padding_is_not_called_exact(prompt: int, grade: str) -> None:
    """vLLM counts the last token of a cached prompt as a step whose proposal was refused."""
    padded = Steps((0, 2), (K, K), K)
    assert reconstruct(padded, 5, prompt=prompt).grade == grade
    assert reconstruct(Steps((1, 2), (K, K), K), 6, prompt=prompt).grade == "exact"  # something was accepted


@given(st.lists(st.integers(0, K), min_size=1, max_size=30), st.data())
def test_a_proposal_that_the_limit_leaves_no_room_for_is_not_called_short(
    accepted: list[int], data: st.DataObject
) -> None:
    """A drafter that proposes no more than is wanted: the last proposals of an output that ends at its limit."""
    limit = data.draw(st.integers(2, 60))
    at, drafted, took = 1, [], []
    for a in accepted:
        room = min(K, limit - at - 1)
        if room < 1:
            break
        drafted.append(room)
        took.append(min(a, room))
        at += took[-1] + 1
    if not took:
        return
    steps = Steps(tuple(took), tuple(drafted), K)
    assert reconstruct(steps, at, limit=limit).grade == "exact"
    if any(d < K for d in drafted):
        assert reconstruct(steps, at).grade == "approx"
        assert reconstruct(steps, at, limit=limit + K).grade == "approx"


def test_no_steps_make_no_rounds() -> None:
    assert reconstruct(Steps((), (), K), 9).grade == "none"


@pytest.mark.parametrize(("accepted", "drafted"), [((1,), (1, 2)), ((3,), (2,)), ((-1,), (2,))])
def test_counts_that_contradict_themselves_are_refused(accepted: tuple[int, ...], drafted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="step"):
        Steps(accepted, drafted, K)
