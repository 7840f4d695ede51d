"""The live follower: a server takes up what the pointer says, and acknowledges it. Faults: test_live_faults."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import live
from storage.announcements import announce
from storage.servers import Server
from tests.service.live_rig import FAST, NOWHERE, SLOW, Rig
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until


@pytest.fixture
def rig(sqlite_template: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig.of(sqlite_template, tmp_path)
    yield made
    made.close()


def test_a_server_takes_up_the_live_version_and_acknowledges_it(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    assert rig.swapped == [(1, "drafter 1")]
    server = rig.server()
    assert (server.generation, server.version, server.host_kind, server.error) == (1, 1, "reference", "")


def test_the_acknowledgement_comes_after_the_swap(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Server]] = []
    monkeypatch.setattr(rig, "swap", lambda *_: seen.append(rig.servers.live("chat")))
    rig.follower().follow_once()
    assert seen == [[]]
    assert rig.server().generation == 1


def test_an_announced_promotion_is_applied_at_once(rig: Rig, valkey: ValkeyServer) -> None:
    follower = rig.follower(valkey.url, SLOW)
    follower.start()
    until(rig.acknowledged(1))
    until(lambda: follower.connected)
    generation = rig.promote(2)
    announce(valkey.client(), "chat", generation)
    until(rig.acknowledged(generation))
    assert rig.swapped[-1] == (generation, "drafter 2")


def test_a_promotion_nobody_announced_is_found_by_polling(rig: Rig) -> None:
    rig.follower(NOWHERE, FAST).start()
    until(rig.acknowledged(1))
    until(rig.acknowledged(rig.promote(2)))


def test_a_rollback_takes_the_drafter_that_was_kept(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2)
    follower.follow_once()
    generation = rig.rollback()
    follower.follow_once()
    assert rig.swapped[-1] == (generation, "drafter 1")
    assert rig.loaded == [1, 2]


def test_only_the_last_three_drafters_are_kept(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    for number in (2, 3, 4, 3, 1):
        rig.promote(number)
        follower.follow_once()
    assert rig.loaded == [1, 2, 3, 4, 1]
    assert (follower.swaps, follower.failures) == (6, 0)


def test_a_pointer_that_went_away_and_came_back_is_acknowledged_without_a_swap(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.promote(2)
    generation = rig.rollback()
    follower.follow_once()
    assert rig.server().generation == generation
    assert rig.swapped == [(1, "drafter 1")]


def test_a_server_beats_while_nothing_happens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.05)
    rig.follower().start()
    until(rig.acknowledged(1))
    first = rig.server().last_seen
    until(lambda: rig.server().last_seen > first)


def test_a_server_that_stops_signs_off(rig: Rig) -> None:
    follower = rig.follower(config=SLOW)
    follower.start()
    until(rig.acknowledged(1))
    began = time.monotonic()
    follower.close(timeout=60)
    assert time.monotonic() - began < 30  # before the next poll
    assert rig.servers.live("chat") == []
    assert not follower.running
