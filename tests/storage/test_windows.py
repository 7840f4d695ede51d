"""Windows: each record used once, the file before the rows, one open window a drafter."""

from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage.registry import Registry, UnknownDrafter
from storage.weights import BlobDamaged, WeightsStore
from storage.windows import Window, WindowOpen, Windows
from tests.storage.rows import make_drafter, make_record

A, B, C = (make_record(name) for name in "abc")


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


@pytest.fixture
def windows(engine: Engine, store: WeightsStore) -> Windows:
    make_drafter(Registry(engine))
    return Windows(engine, store)


def test_a_window_gives_its_records_back(windows: Windows) -> None:
    window = _keep(windows, (A, B), (C,))
    assert (window.training, window.holdout, window.state) == (2, 1, "open")
    records = windows.records(window)
    assert (records.training, records.holdout) == ((A, B), (C,))


def test_a_window_is_open_until_it_is_closed(windows: Windows) -> None:
    assert windows.open("chat") is None
    window = _keep(windows, (A,))
    assert windows.open("chat") == window
    windows.close(window, "refused")
    assert windows.open("chat") is None
    assert [(w.state, w.outcome) for w in windows.recent("chat", 5)] == [("closed", "refused")]


def test_closing_again_keeps_the_first_outcome(windows: Windows) -> None:
    window = _keep(windows, (A,))
    windows.close(window, "promoted")
    windows.close(window, "failed")
    assert windows.recent("chat", 1)[0].outcome == "promoted"


def test_a_second_window_waits_for_the_first(windows: Windows) -> None:
    _keep(windows, (A,))
    with pytest.raises(WindowOpen, match="of chat is open"):
        windows.keep("chat", (B,), ())
    assert windows.known(["b"]) == set()


def test_records_that_a_window_has_are_left_out_of_the_next(windows: Windows) -> None:
    windows.close(_keep(windows, (A,), (B,)), "promoted")
    second = _keep(windows, (A, C), (B,))
    assert windows.records(second).training == (C,)
    assert windows.records(second).holdout == ()


def test_a_record_that_arrived_twice_is_kept_once(windows: Windows) -> None:
    window = _keep(windows, (A, B, A), (B,))
    assert windows.records(window).training == (A, B)
    assert windows.records(window).holdout == ()


def test_nothing_new_makes_no_window(windows: Windows, store: WeightsStore) -> None:
    windows.close(_keep(windows, (A,)), "promoted")
    files = set(store.digests())
    assert windows.keep("chat", (A,), ()) is None
    assert windows.keep("chat", (), ()) is None
    assert set(store.digests()) == files


def test_known_are_those_of_all_windows(windows: Windows) -> None:
    _keep(windows, (A,), (B,))
    assert windows.known(["a", "b", "c"]) == {"a", "b"}


def test_any_number_of_ids_can_be_asked_for(windows: Windows) -> None:
    many = tuple(make_record(f"r{number}") for number in range(1200))
    _keep(windows, many)
    assert len(windows.known([*(r.record_id for r in many), "other"])) == 1200


def test_recent_windows_come_newest_first(windows: Windows) -> None:
    kept = []
    for record in (A, B, C):
        kept.append(_keep(windows, (record,)))
        windows.close(kept[-1], "promoted")
    assert [w.id for w in windows.recent("chat", 2)] == [kept[2].id, kept[1].id]


def test_a_file_that_cannot_be_written_leaves_no_row(
    windows: Windows, store: WeightsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", fail)
        with pytest.raises(OSError, match="disk is full"):
            windows.keep("chat", (A,), ())
    assert windows.known(["a"]) == set()
    assert windows.open("chat") is None


def test_a_damaged_file_is_noticed(windows: Windows, store: WeightsStore) -> None:
    window = _keep(windows, (A,))
    store.path(window.sha256).write_bytes(b"something else")
    with pytest.raises(BlobDamaged):
        windows.records(window)


def test_a_window_needs_a_drafter(windows: Windows) -> None:
    with pytest.raises(UnknownDrafter):
        windows.keep("nobody", (A,), ())


def _keep(windows: Windows, training: tuple, holdout: tuple = ()) -> Window:  # type: ignore[type-arg]
    window = windows.keep("chat", training, holdout)
    assert window is not None
    return window
