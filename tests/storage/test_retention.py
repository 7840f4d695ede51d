"""Retention: old weights and windows go, what may be needed stays, and rows stay always."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from storage import audit, garbage, marks, retention
from storage.database import transaction
from storage.marks import VersionRefused
from storage.registry import NothingToRollBackTo, Registry, Version
from storage.retention import RetentionConfig
from storage.servers import Servers
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.storage.rows import make_record, make_training

FEW = RetentionConfig(versions_kept=2, rollbacks_kept=1)


class Shelf:
    """A drafter with versions, each with weights and a window of its own."""

    def __init__(self, engine: Engine, store: WeightsStore) -> None:
        self.engine, self.store = engine, store
        self.registry, self.windows = Registry(engine), Windows(engine, store)
        blob = self.put("version 1")
        self.registry.create_drafter("chat", "causal_lm", "t", "t", {}, blob, 9, "test")

    def put(self, content: str) -> str:
        """A file as if it were two days old."""
        digest = self.store.put(content.encode()).sha256
        self.old(digest)
        return digest

    def old(self, digest: str) -> None:
        then = time.time() - 48 * 3600
        os.utime(self.store.path(digest), (then, then))

    def window(self, name: str, state: str = "closed") -> Window:
        window = self.windows.keep("chat", (make_record(name),), ())
        assert window is not None
        self.old(window.sha256)
        if state == "closed":
            self.windows.close(window, "promoted")
        return window

    def grow(self, count: int, live: bool = False) -> list[Version]:
        """More versions, each of the one that is live; with `live`, each goes live."""
        made = []
        for _ in range(count):
            number = len(self.registry.versions("chat")) + 1
            parent, window = self.registry.live("chat"), self.window(f"r{number}")
            made.append(self.registry.add_candidate(parent, self.put(f"v{number}"), 9, window.id, make_training()))
            if live:
                self.registry.promote(made[-1], parent, "test", "better")
        return made

    def expire(self, config: RetentionConfig = FEW) -> int:
        return retention.expire(self.engine, config)

    def kept(self) -> list[int]:
        return [s.version.number for s in self.registry.versions("chat") if not s.weights_deleted]


@pytest.fixture
def shelf(engine: Engine, tmp_path: Path) -> Shelf:
    return Shelf(engine, WeightsStore(tmp_path / "weights"))


def test_the_newest_versions_version_1_and_the_live_and_previous_ones_stay(shelf: Shelf) -> None:
    shelf.grow(3, live=True)
    shelf.registry.rollback("chat", 2, "test", "2 is live, 1 is previous")
    shelf.grow(4)
    assert shelf.expire() == 3
    assert shelf.kept() == [1, 2, 4, 7, 8], "4 was live before 2"


def test_marked_weights_are_deleted_and_the_rows_stay(shelf: Shelf) -> None:
    second = shelf.grow(5)[0]
    shelf.expire()
    assert garbage.collect(shelf.engine, shelf.store, 24) == 3
    assert not shelf.store.has(second.weights_sha256)
    found = {s.version.number: s for s in shelf.registry.versions("chat")}
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [n for n, s in found.items() if s.weights_deleted] == [2, 3, 4]
    assert shelf.expire() == 0


def test_a_crash_between_mark_and_file_leaves_a_file_that_goes_the_next_time(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = shelf.grow(5)[0]
    shelf.expire()
    with monkeypatch.context() as dying:
        dying.setattr(shelf.store, "delete", _die)
        with pytest.raises(KeyboardInterrupt):
            garbage.collect(shelf.engine, shelf.store, 24)
    assert shelf.store.has(second.weights_sha256)
    with pytest.raises(VersionRefused):
        shelf.registry.promote(second, shelf.registry.live("chat"), "operator", "its file is still there")
    garbage.collect(shelf.engine, shelf.store, 24)
    assert not shelf.store.has(second.weights_sha256)


def test_going_live_with_deleted_weights_is_refused_with_the_way_out(shelf: Shelf) -> None:
    second = shelf.grow(5)[0]
    shelf.expire()
    with pytest.raises(VersionRefused, match=r"weights of version 2 of chat were deleted .*redraft reproduce 2 --rest"):
        shelf.registry.promote(second, shelf.registry.live("chat"), "operator", "try")
    with pytest.raises(VersionRefused, match="were deleted"):
        shelf.registry.rollback("chat", 2, "operator", "try")
    assert shelf.registry.live("chat").number == 1


def test_versions_that_were_live_last_stay_to_be_rolled_back_to(shelf: Shelf) -> None:
    shelf.grow(6, live=True)
    shelf.expire(RetentionConfig(versions_kept=1, rollbacks_kept=4))
    assert shelf.kept() == [1, 3, 4, 5, 6, 7]
    for expected in (6, 5, 4, 3):
        assert shelf.registry.rollback("chat", None, "test", "further back").live.number == expected


def test_rolling_back_passes_over_versions_that_cannot_be_served(shelf: Shelf) -> None:
    shelf.grow(3, live=True)
    with transaction(shelf.engine) as session:
        for number in (2, 3):
            marks.put(session, shelf.registry.version("chat", number).id, marks.WITHDRAWN, "test", "a test")
    assert shelf.registry.rollback("chat", None, "test", "worse").live.number == 1
    with pytest.raises(NothingToRollBackTo):
        shelf.registry.rollback("chat", None, "test", "there is nothing before it")


def test_what_was_taken_back_is_not_gone_back_to(shelf: Shelf) -> None:
    second, third = shelf.grow(2, live=True)
    shelf.registry.rollback("chat", None, "test", "3 is worse")
    (fourth,) = shelf.grow(1, live=True)
    assert shelf.registry.live("chat") == fourth
    with transaction(shelf.engine) as session:
        marks.put(session, second.id, marks.WITHDRAWN, "test", "a test")
    assert shelf.registry.rollback("chat", None, "test", "worse").live.number == 1
    assert third.number == 3


def test_a_pinned_version_stays_until_it_is_not_pinned_any_more(shelf: Shelf) -> None:
    shelf.grow(5)
    marks.pin(shelf.engine, "chat", 3, True, "operator")
    shelf.expire()
    assert shelf.kept() == [1, 3, 5, 6]
    assert next(s for s in shelf.registry.versions("chat") if s.version.number == 3).pinned
    marks.pin(shelf.engine, "chat", 3, False, "operator")
    assert shelf.expire() == 1
    with pytest.raises(VersionRefused):
        marks.pin(shelf.engine, "chat", 3, True, "operator")
    assert audit.verify(shelf.engine) is None


def test_the_versions_of_an_undecided_update_stay(shelf: Shelf) -> None:
    parent = shelf.grow(1, live=True)[0]
    window = shelf.window("open", state="open")
    candidate = shelf.registry.add_candidate(parent, shelf.put("undecided"), 9, window.id, make_training())
    shelf.registry.rollback("chat", 1, "operator", "meanwhile")
    _number_far_ahead(shelf)
    shelf.expire(RetentionConfig(versions_kept=1, rollbacks_kept=0))
    assert {parent.number, candidate.number} <= set(shelf.kept())


def test_withdrawn_weights_are_not_kept_for_being_new(shelf: Shelf) -> None:
    newest = shelf.grow(3)[-1]
    with transaction(shelf.engine) as session:
        marks.put(session, newest.id, marks.WITHDRAWN, "test", "learnt from purged records")
    shelf.expire()
    assert newest.number not in shelf.kept()


def test_a_file_that_another_version_shares_stays(shelf: Shelf) -> None:
    shelf.grow(1)
    window = shelf.window("same")
    same = shelf.registry.version("chat", 2).weights_sha256
    shelf.registry.add_candidate(shelf.registry.live("chat"), same, 9, window.id, make_training())
    shelf.expire(RetentionConfig(versions_kept=1, rollbacks_kept=0))
    assert shelf.kept() == [1, 3]
    garbage.collect(shelf.engine, shelf.store, 24)
    assert shelf.store.has(same)


def test_windows_past_their_number_lose_their_file_and_keep_their_rows(shelf: Shelf) -> None:
    first, *rest = [shelf.window(name) for name in "abc"]
    assert shelf.expire(RetentionConfig(windows_kept=2)) == 1
    garbage.collect(shelf.engine, shelf.store, 24)
    assert not shelf.store.has(first.sha256)
    assert all(shelf.store.has(w.sha256) for w in rest)
    assert shelf.windows.window(first.id).deleted
    assert [w.id for w in shelf.windows.recent("chat", 5)] == [w.id for w in reversed(rest)]
    assert shelf.windows.known("abc") == {"a", "b", "c"}, "a record that comes again is not used again"


def test_windows_past_their_age_go_unless_they_are_open(shelf: Shelf) -> None:
    old, still_open = shelf.window("a"), shelf.window("b", state="open")
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE feedback_window SET created_at = '2001-01-01 00:00:00+00:00'"))
    assert shelf.expire(RetentionConfig(windows_days=30)) == 1
    assert shelf.windows.window(old.id).deleted
    assert not shelf.windows.window(still_open.id).deleted


def test_servers_that_ended_long_ago_leave_the_list(engine: Engine) -> None:
    servers = Servers(engine)
    for name in ("here", "gone"):
        servers.beat(name, "reference", "chat", 1, 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE server SET last_seen = '2001-01-01 00:00:00+00:00' WHERE id = 'gone'"))
    assert servers.forget(timedelta(hours=24)) == 1
    assert [s.id for s in servers.live("chat", within_seconds=1e9)] == ["here"]


def _number_far_ahead(shelf: Shelf) -> None:
    """Newer versions, straight into the table: only one window can be open."""
    with shelf.engine.begin() as connection:
        for number in range(10, 14):
            connection.execute(
                text(
                    "INSERT INTO drafter_version (drafter_id, number, weights_sha256, size_bytes, created_at) "
                    "VALUES (1, :number, 'x', 1, '2026-01-01 00:00:00+00:00')"
                ),
                {"number": number},
            )


def _die(*_: object) -> None:
    raise KeyboardInterrupt
