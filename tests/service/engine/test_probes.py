"""The account that probes are paid from."""

import pytest

from service.engine.probes import SAVED, Plan, Probes


def saving(probes: Probes, ms: float) -> None:
    """Time without a probe."""
    probes.account(ms, 1, 1.0)


def test_a_probe_waits_until_the_share_of_the_time_has_paid_for_it() -> None:
    probes, plan = Probes(0.01), Plan(2, 3, 10.0)
    saving(probes, 900)
    assert not probes.offer(plan)
    saving(probes, 200)
    assert probes.offer(plan)
    assert (probes.running, probes.draft_length) == (True, 2)


def test_a_probe_lasts_for_its_rounds() -> None:
    probes = Probes(0.01)
    saving(probes, 2000)
    probes.offer(Plan(1, 3, 10.0))
    for left in (True, True, False):
        probes.account(10.0, 1, 0.1)
        assert probes.running is left


def test_a_first_round_in_which_no_drafter_could_propose_is_none_of_a_probes() -> None:
    probes = Probes(0.01)
    saving(probes, 2000)
    probes.offer(Plan(1, 2, 10.0))
    for proposed, left in ((False, True), (True, True), (False, False)):  # but it does not wait for ever
        probes.account(10.0, 1, 0.1, proposed)
        assert probes.running is left
    probes.start(Plan(0, 1, 0.0))
    probes.account(10.0, 1, 0.1, False)
    assert not probes.running


def test_what_a_probe_really_lost_is_paid_before_the_next() -> None:
    probes, plan = Probes(0.01), Plan(1, 1, 10.0)
    saving(probes, 1000)
    assert probes.offer(plan)
    probes.account(150.0, 1, 0.01)  # its token was worth 100 ms
    saving(probes, 4000)
    assert not probes.offer(plan)
    saving(probes, 1100)
    assert probes.offer(plan)


def test_a_probe_that_gains_pays_for_the_next() -> None:
    probes, plan = Probes(0.01), Plan(1, 1, 10.0)
    saving(probes, 1000)
    assert probes.offer(plan)
    probes.account(100.0, 2, 0.01)  # two tokens worth 100 ms each
    assert probes.offer(plan)


def test_means_for_a_few_probes_are_saved_at_most() -> None:
    probes, plan = Probes(0.01), Plan(1, 1, 10.0)
    saving(probes, 1e9)
    started = 0
    while probes.offer(plan):
        probes.account(20.0, 1, 0.1)  # loses 10 ms
        started += 1
    assert started == pytest.approx(SAVED, abs=1)
