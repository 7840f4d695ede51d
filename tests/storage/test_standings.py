"""Standings: kept by workload and drafter, each window once, bounded in number; shares of traffic and draft costs."""

import threading
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine

from storage import history, standings
from storage.registry import Registry
from storage.routes import LEARNED, Routes
from storage.standings import Score, Standing, Standings
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.storage.rows import make_drafter, make_record, make_round

TARGET = "target-1"
GOOD = Standing(3, 0.75, {"greedy": Score(20.0, 0.1 + 0.2, 0.01), "sampled": Score(4.0, 0.5, 0.0)}, 24)
POOR = Standing(1, 0.25, {"greedy": Score(20.0, 0.2, 0.01)}, 20)


@pytest.fixture
def store(engine: Engine) -> Standings:
    make_drafter(Registry(engine))
    make_drafter(Registry(engine), "sql")
    return Standings(engine)


@pytest.fixture
def windows(engine: Engine, tmp_path: Path) -> Windows:
    return Windows(engine, WeightsStore(tmp_path / "weights"))


def test_standings_come_back_as_they_were_left_and_are_the_routes_weights(store: Standings, windows: Windows) -> None:
    window = _window(windows, "a")
    assert store.revise(TARGET, window.id, lambda known: {"code": {"chat": GOOD, "sql": POOR}})
    assert Standings(store.engine).of(TARGET) == {"code": {"chat": GOOD, "sql": POOR}}
    assert store.of("target-2") == {}
    routes = Routes(store.engine)
    routes.put(TARGET, "code", "chat", LEARNED, "routing")
    assert routes.of(TARGET)[0].weights == {"chat": 0.75, "sql": 0.25}


def test_a_window_counts_once(store: Standings, windows: Windows) -> None:
    window = _window(windows, "a")
    assert store.unscored(TARGET) == [window.id]
    assert store.revise(TARGET, window.id, lambda known: {"code": {"chat": GOOD}})
    assert not store.revise(TARGET, window.id, lambda known: {"code": {"chat": POOR}})
    assert store.of(TARGET)["code"]["chat"] == GOOD
    assert store.unscored(TARGET) == []


def test_an_undecided_window_waits_and_another_targets_is_none_of_ours(store: Standings, windows: Windows) -> None:
    make_drafter(Registry(store.engine), "foreign", target="target-2")
    foreign = _window(windows, "b", drafter="foreign")
    window = windows.keep("chat", (make_record("a"),), ())
    assert window is not None
    assert store.unscored(TARGET) == []
    windows.close(window, "refused")
    assert store.unscored(TARGET) == [window.id]
    assert store.unscored("target-2") == [foreign.id]


def test_of_a_long_backlog_the_newest_windows_are_scored(
    store: Standings, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "BACKLOG", 2)
    made = [_window(windows, name).id for name in "abc"]
    assert store.unscored(TARGET) == made[1:]


def test_the_least_recently_scored_workload_leaves_when_there_are_too_many(
    store: Standings, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "WORKLOADS", 2)
    for number, workload in enumerate(("a", "b", "a", "c")):
        window = _window(windows, str(number))
        store.revise(TARGET, window.id, lambda known, w=workload: {w: {"chat": GOOD}})
    assert sorted(store.of(TARGET)) == ["a", "c"]


def test_a_retired_drafter_has_no_standing(store: Standings, windows: Windows) -> None:
    store.revise(TARGET, _window(windows, "a").id, lambda known: {"code": {"chat": GOOD, "sql": POOR}})
    Registry(store.engine).retire_drafter("sql", "me")
    assert store.of(TARGET) == {"code": {"chat": GOOD}}


def test_shares_are_of_all_requests_of_the_target(store: Standings, windows: Windows) -> None:
    _window(windows, "a", "b", "c", workload="code")
    _window(windows, "d", workload="spider", drafter="sql")
    assert store.shares(TARGET, hours=1.0) == {"code": 0.75, "spider": 0.25}
    assert store.shares(TARGET, hours=0.0) == {}


def test_a_draft_step_costs_its_part_of_a_target_pass(store: Standings) -> None:
    record = make_record("a", rounds=(make_round(1, 4, 2), make_round(1, 4, 4)), finished_at=1_700_000_000.0)
    lossy = msgspec.structs.replace(record, record_id="b", lossless=False, rounds=(make_round(1, 4, 4),))
    history.fold(store.engine, [record, lossy])  # 2 ms of drafting and 10 ms of verification a round
    assert store.draft_costs(["chat", "sql"], hours=24 * 365 * 100) == {"chat": pytest.approx(0.5 / 10)}
    assert store.draft_costs(["chat"], hours=0.0) == {}


def test_trainers_that_score_at_once_lose_no_window(store: Standings, windows: Windows) -> None:
    ids = [_window(windows, str(n)).id for n in range(6)]

    def run() -> None:
        for window in ids:
            store.revise(TARGET, window, lambda known: {"code": {"chat": _one_more(known.get("code", {}).get("chat"))}})

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.of(TARGET)["code"]["chat"].scored == len(ids)


def _one_more(standing: Standing | None) -> Standing:
    return Standing(1, 1.0, {}, (standing.scored if standing else 0) + 1)


def _window(windows: Windows, *names: str, workload: str = "code", drafter: str = "chat") -> Window:
    """A decided window of one record a name."""
    records = tuple(msgspec.structs.replace(make_record(name), workload=workload) for name in names)
    window = windows.keep(drafter, records, ())
    assert window is not None
    windows.close(window, "promoted")
    return window
