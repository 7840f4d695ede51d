"""Drift's rows: series survive and are bounded, alarms are kept with their cause until a window answers them."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage import drift
from storage.drift import FALL, NOVEL, DriftStore, Finding, Key, Revision, Series
from storage.registry import Registry, UnknownDrafter
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import make_drafter, make_record

FELL = Finding(FALL, "code", "greedy", 1, 0.7, 0.4, 9, "acceptance probability of code fell")
CAME = Finding(NOVEL, "sql", "greedy", 1, None, None, 1, "workload sql is new")


@pytest.fixture
def store(engine: Engine) -> DriftStore:
    make_drafter(Registry(engine))
    return DriftStore(engine)


@pytest.fixture
def windows(engine: Engine, tmp_path: Path) -> Windows:
    return Windows(engine, WeightsStore(tmp_path / "weights"))


def test_a_series_comes_back_as_it_was_left(store: DriftStore) -> None:
    series = Series(3, 12, {"mean": 0.1 + 0.2, "count": 7})
    store.revise("chat", lambda known: Revision({("code", "greedy"): series}, ()))
    seen: list[Mapping[Key, Series]] = []
    DriftStore(store.engine).revise("chat", lambda known: seen.append(known) or Revision({}, ()))
    assert seen == [{("code", "greedy"): series}]


def test_the_least_recently_seen_series_leaves_when_there_are_too_many(
    store: DriftStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "SERIES", 3)
    for workload in ("a", "b", "c", "a", "d"):
        store.revise("chat", lambda known, w=workload: Revision({(w, "greedy"): Series(1, 1, {})}, ()))
    assert [view.workload for view in store.series("chat")] == ["d", "a", "c"]


def test_a_fall_is_pending_until_a_window_answers_it(store: DriftStore, windows: Windows) -> None:
    (alarm,) = store.revise("chat", lambda known: Revision({}, (FELL,)))
    assert (alarm.finding, alarm.window_id) == (FELL, None)
    assert store.pending("chat")
    window = windows.keep("chat", (make_record("a"),), (), cause="drift", left_out={"repeated": 2})
    assert window is not None
    assert (window.cause, window.left_out) == ("drift", {"repeated": 2})
    assert not store.pending("chat")
    assert [a.finding for a in store.alarms("chat", window_id=window.id)] == [FELL]
    windows.close(window, "refused")
    second = windows.keep("chat", (make_record("b"),), ())
    assert second is not None
    assert store.alarms("chat", window_id=second.id) == []


def test_a_window_of_nothing_new_answers_no_alarm(store: DriftStore, windows: Windows) -> None:
    store.revise("chat", lambda known: Revision({}, (FELL,)))
    assert windows.keep("chat", (), ()) is None
    assert store.pending("chat")


def test_a_new_workload_is_told_and_awaits_no_update(store: DriftStore) -> None:
    store.revise("chat", lambda known: Revision({}, (CAME,)))
    assert not store.pending("chat")
    assert [a.finding.reason for a in store.alarms("chat")] == ["workload sql is new"]


def test_a_flood_of_new_labels_drives_no_fall_out(store: DriftStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "ALARMS", 2)
    store.revise("chat", lambda known: Revision({}, (FELL,)))
    for _ in range(4):
        store.revise("chat", lambda known: Revision({}, (CAME, CAME)))
    assert [a.finding.kind for a in store.alarms("chat")] == [NOVEL, NOVEL, FALL]
    assert store.pending("chat")


def test_drafters_have_alarms_of_their_own(store: DriftStore) -> None:
    make_drafter(Registry(store.engine), "other")
    store.revise("chat", lambda known: Revision({("code", "greedy"): Series(1, 1, {})}, (FELL,)))
    assert not store.pending("other")
    assert store.series("other") == []
    with pytest.raises(UnknownDrafter):
        store.pending("nobody")


def test_two_housekeepers_take_turns_and_lose_no_request(store: DriftStore) -> None:
    def count(known: Mapping[Key, Series]) -> Revision:
        before = known.get(("code", "greedy"), Series(1, 0, {}))
        return Revision({("code", "greedy"): Series(1, before.requests + 1, {})}, ())

    def run() -> None:
        for _ in range(10):
            store.revise("chat", count)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [view.requests for view in store.series("chat")] == [30]
