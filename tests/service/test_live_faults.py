"""The live follower when something fails: the server goes on with what it has, says why, and catches up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service import live
from storage.announcements import POINTER_CHANNEL, announce
from tests.service.live_rig import FAST, SLOW, Clock, Rig
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until


@pytest.fixture
def rig(sqlite_template: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig.of(sqlite_template, tmp_path)
    yield made
    made.close()


def test_after_a_restart_of_redis_announcements_count_again(rig: Rig, own_valkey: ValkeyServer) -> None:
    follower = rig.follower(own_valkey.url, SLOW)
    follower.start()
    until(lambda: follower.connected)
    own_valkey.kill()
    until(lambda: not follower.connected)
    own_valkey.start()
    until(lambda: follower.connected)
    generation = rig.promote(2)
    announce(own_valkey.client(), "chat", generation)
    until(rig.acknowledged(generation))


def test_forged_announcements_change_nothing(rig: Rig, valkey: ValkeyServer) -> None:
    follower = rig.follower(valkey.url, FAST)
    follower.start()
    until(lambda: follower.connected)
    announce(valkey.client(), "chat", 99)
    for forged in (b"", b"{", b'{"drafter": "chat", "generation": "many"}'):
        valkey.client().publish(POINTER_CHANNEL, forged)
    until(rig.acknowledged(rig.promote(2)))
    assert [generation for generation, _ in rig.swapped] == [1, 2]


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_and_says_why(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.damaged.add(2)
    rig.promote(2)
    follower.follow_once()
    server = rig.server()
    assert (server.generation, server.version) == (1, 1)
    assert server.error == "version 2: the file is damaged"
    assert rig.swapped == [(1, "drafter 1")]
    assert follower.failures == 1


def test_a_swap_that_the_engine_refuses_is_a_failure_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig, "swap", refuse)
    follower = rig.follower()
    follower.follow_once()
    assert (rig.server().generation, rig.server().error) == (0, "version 1: out of memory")
    assert follower.version is None


def test_a_failed_version_is_tried_again_later_and_then_served(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FIRST_RETRY", 0.2)
    rig.damaged.add(1)
    rig.follower().start()
    until(lambda: len(rig.loaded) >= 2)
    rig.damaged.clear()
    until(rig.acknowledged(1))
    assert rig.server().error == ""


def test_a_failed_version_is_not_tried_at_every_look(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    follower = rig.follower()
    rig.damaged.add(1)
    for _ in range(5):
        follower.follow_once()
    assert rig.loaded == [1]
    clock.now += live.FIRST_RETRY
    follower.follow_once()
    assert rig.loaded == [1, 1]


def test_a_newer_generation_does_not_wait_for_a_failed_one(rig: Rig) -> None:
    follower = rig.follower()
    follower.follow_once()
    rig.damaged.add(2)
    rig.promote(2)
    follower.follow_once()
    generation = rig.promote(3)
    follower.follow_once()
    assert rig.swapped[-1] == (generation, "drafter 3")
    assert rig.server().error == ""


def test_a_database_that_is_away_for_a_while_is_borne(rig: Rig, tmp_path: Path) -> None:
    follower = rig.follower()
    follower.start()
    until(rig.acknowledged(1))
    rig.engine.dispose()
    files = sorted(tmp_path.glob("redraft.db*"))
    for file in files:
        file.rename(tmp_path / f"away-{file.name}")
    until(lambda: not follower.registry_reachable)
    for file in sorted(tmp_path.glob("redraft.db*")):
        file.unlink()  # SQLite made an empty one
    rig.engine.dispose()
    for file in files:
        (tmp_path / f"away-{file.name}").rename(file)
    rig.engine.dispose()
    until(lambda: follower.registry_reachable)
    until(rig.acknowledged(rig.promote(2)))
