"""The live follower around a promotion: two versions at once, the end of the holdback, and the floor."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from service import live
from service.engine.floor import Broken
from storage.registry import Registry
from storage.watches import Watches
from tests.service.live_rig import SLOW, Clock, Rig
from tests.waiting import until

NONSENSE = Broken(2, "below the floor right after the swap")


@pytest.fixture
def rig(sqlite_template: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig.of(sqlite_template, tmp_path)
    yield made
    made.close()


def offered(rig: Rig) -> list[tuple[int, float, bool]]:
    """(version, holdback, guarded) of each swap."""
    return [(offer.version.number, offer.holdback, offer.guarded) for offer in rig.offers]


def end_watch(rig: Rig, state: str = "safe") -> None:
    watches = Watches(rig.engine)
    found = watches.open("chat")
    assert found is not None
    watches.close(found, state, "because")


def test_after_a_promotion_a_share_stays_and_the_floor_is_on(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2, holdback=0.1)
    follower.follow_once()
    assert offered(rig) == [(1, 0.0, False), (2, 0.1, True)]
    assert rig.loaded == [1, 2]


def test_a_server_that_starts_during_a_watch_loads_both_versions(rig: Rig) -> None:
    rig.promote(2, holdback=0.1)
    rig.follower().follow_once()
    assert offered(rig) == [(1, 0.0, False), (2, 0.1, True)]
    assert rig.server().version == 2


def test_a_server_that_starts_later_loads_one_and_does_not_judge_it(rig: Rig) -> None:
    rig.promote(2, holdback=0.1)
    end_watch(rig)
    rig.follower().follow_once()
    assert offered(rig) == [(2, 0.0, False)]


def test_where_the_predecessor_cannot_be_loaded_the_live_version_serves_all(rig: Rig) -> None:
    rig.promote(2, holdback=0.1)
    rig.damaged.add(1)
    follower = rig.follower()
    follower.follow_once()
    assert offered(rig) == [(2, 0.0, False)]
    assert (rig.server().version, rig.server().error) == (2, "")


def test_the_end_of_the_watch_ends_the_holdback_without_a_swap(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2, holdback=0.1)
    follower.follow_once()
    follower.follow_once()
    assert rig.held == []
    end_watch(rig)
    follower.follow_once()
    follower.follow_once()
    assert rig.held == [0.0]
    assert len(rig.swapped) == 2


def test_a_rollback_holds_nothing_back_and_is_not_judged(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2, holdback=0.1)
    follower.follow_once()
    rig.rollback()
    follower.follow_once()
    assert offered(rig)[-1] == (1, 0.0, False)


def test_what_the_engine_went_back_from_is_rolled_back_and_quarantined(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2, holdback=0.1)
    follower.follow_once()
    rig.broken = NONSENSE
    follower.follow_once()
    event = rig.registry.events("chat")[0]
    assert (event.kind, event.after, event.actor, event.reason) == (
        "rollback", 1, "server:server-1", NONSENSE.reason,
    )  # fmt: skip
    assert rig.registry.versions("chat")[1].state == "quarantined"
    assert offered(rig)[-1] == (1, 0.0, False)
    assert (rig.server().version, rig.server().generation) == (1, 3)


def test_it_is_noticed_at_once_and_not_at_the_next_poll(rig: Rig) -> None:
    follower = rig.follower(config=SLOW)
    follower.start()
    until(rig.acknowledged(1))
    rig.broken = Broken(1, "not the version that replaced any")  # nothing to go back to: said once, and no more
    until(lambda: rig.registry.versions("chat")[0].reason == rig.broken.reason)
    assert rig.registry.live("chat").number == 1


def test_of_several_servers_one_moves_the_pointer(rig: Rig) -> None:
    followers = [rig.follower(), rig.follower()]
    for follower in followers:
        follower.follow_once()
    rig.promote(2)
    for follower in followers:
        follower.follow_once()
    rig.broken = NONSENSE
    for follower in followers:
        follower.follow_once()
    assert [e.kind for e in rig.registry.events("chat")] == ["rollback", "promote", "init"]


def test_while_the_database_is_away_the_rollback_waits_and_is_then_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2)
    follower.follow_once()
    rig.broken = NONSENSE
    with monkeypatch.context() as away:
        away.setattr(Registry, "take_back", _away)
        away.setattr(Registry, "pointer", _away)
        with pytest.raises(OperationalError):
            follower.follow_once()
        assert follower._unsaid() is None  # not hammered
    clock.now += follower.config.live_poll_seconds
    assert follower._unsaid() is not None
    follower.follow_once()
    assert rig.registry.live("chat").number == 1


def _away(*_: object) -> None:
    raise OperationalError("SELECT 1", {}, Exception("the database is away"))
