"""The live follower while a canary is out: both versions loaded, and how it ends in the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.engine.floor import Broken
from storage.canary import Canaries
from tests.service.live_rig import Rig

NONSENSE = Broken(2, "below the floor right after the swap")


@pytest.fixture
def rig(sqlite_template: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig.of(sqlite_template, tmp_path)
    yield made
    made.close()


def send_out(rig: Rig, number: int, share: float = 0.1) -> None:
    Canaries(rig.engine).send_out(rig.versions[number - 1], rig.registry.live("chat"), share, "test", "because")


def offered(rig: Rig) -> list[tuple[int, float, bool, bool]]:
    """(version, share of the one before, guarded, canary) of each swap."""
    return [(o.version.number, pytest.approx(o.holdback), o.guarded, o.canary) for o in rig.offers]


def test_a_canary_gets_its_share_and_the_live_version_keeps_the_rest(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    send_out(rig, 2)
    follower.follow_once()
    assert offered(rig) == [(1, 0.0, False, False), (2, 0.9, True, True)]
    assert (rig.server().version, rig.server().generation) == (1, 2)


def test_a_server_that_starts_while_it_is_out_loads_both(rig: Rig) -> None:
    send_out(rig, 2)
    rig.follower().follow_once()
    assert offered(rig) == [(1, 0.0, False, False), (2, 0.9, True, True)]
    assert rig.server().generation == 2


def test_a_promotion_keeps_what_is_in_the_engine_and_only_turns_the_shares(rig: Rig) -> None:
    follower = rig.follower()
    send_out(rig, 2)
    follower.follow_once()
    Canaries(rig.engine).promote(rig.versions[1], rig.versions[0], "safe", "watch", "no fall", holdback=0.2)
    follower.follow_once()
    assert (len(rig.offers), rig.held) == (2, [0.2])
    assert (rig.server().version, rig.server().generation) == (2, 3)


def test_a_recall_goes_back_to_the_live_version_without_a_swap(rig: Rig) -> None:
    follower = rig.follower()
    send_out(rig, 2)
    follower.follow_once()
    rig.rollback()
    follower.follow_once()
    assert (len(rig.offers), rig.held) == (2, [1.0])
    assert (rig.server().version, rig.server().generation) == (1, 3)


def test_a_canary_that_the_engine_went_back_from_is_quarantined_at_once(rig: Rig) -> None:
    follower = rig.follower()
    send_out(rig, 2)
    follower.follow_once()
    rig.broken = NONSENSE
    follower.follow_once()
    event = rig.registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.actor) == ("recall", 2, 1, "server:server-1")
    assert rig.registry.versions("chat")[1].state == "quarantined"
    assert (rig.server().version, rig.server().generation) == (1, 3)
    assert follower._unsaid() is None


def test_one_that_cannot_be_loaded_is_said_and_the_live_version_serves(rig: Rig) -> None:
    rig.damaged.add(2)
    send_out(rig, 2)
    follower = rig.follower()
    follower.follow_once()
    assert offered(rig) == [(1, 0.0, False, False)]
    assert (rig.server().version, rig.server().generation) == (1, 0)
    assert "the file is damaged" in rig.server().error
    rig.rollback()
    follower.follow_once()
    assert (rig.server().version, rig.server().generation, rig.server().error) == (1, 3, "")
    assert rig.held == []


def test_a_canary_after_another_stands_beside_what_is_live(rig: Rig) -> None:
    """The server looks only once: it finds the second one, while its engine still has the first."""
    follower = rig.follower()
    send_out(rig, 2)
    follower.follow_once()
    rig.rollback()
    send_out(rig, 3, 0.2)
    follower.follow_once()
    assert rig.held == [1.0]
    assert offered(rig)[2:] == [(3, 0.8, True, True)]


def test_a_canary_that_was_promoted_although_the_engine_had_gone_back_is_swapped_in(rig: Rig) -> None:
    follower = rig.follower()
    send_out(rig, 2)
    follower.follow_once()
    rig.registry.promote(rig.versions[1], rig.versions[0], "cli:me", "all the same")
    rig.broken = NONSENSE
    follower._say_at = float("inf")
    follower.follow_once()
    assert rig.held == [1.0]
    assert offered(rig)[2:] == [(2, 0.0, True, False)]


def test_it_follows_a_promotion_whose_holdback_was_open(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2, holdback=0.1)
    follower.follow_once()
    send_out(rig, 3)
    follower.follow_once()
    follower.follow_once()
    assert offered(rig)[2:] == [(3, 0.9, True, True)]
    assert rig.held == []
