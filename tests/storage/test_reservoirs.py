"""The reservoir's references: what runs name, which records came since, and which are gone."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine, text

from storage import garbage, purge, reservoirs
from storage.decisions import TrainingInputs
from storage.registry import Registry, Version
from storage.reservoirs import Filled, Kept
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.storage.rows import DIGEST, make_drafter, make_record, make_training

EVER = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


@pytest.fixture
def windows(engine: Engine, store: WeightsStore) -> Windows:
    make_drafter(Registry(engine))
    return Windows(engine, store)


def window_of(windows: Windows, *names: str, holdout: str = "") -> Window:
    records = tuple(make_record(name) for name in names)
    window = windows.keep("chat", records, (make_record(holdout),) if holdout else ())
    assert window is not None
    windows.close(window, "promoted")
    return window


def trained(windows: Windows, window: Window, reservoir: str, moments: str = "") -> Version:
    """A candidate whose run drew from the reservoir of this digest."""
    registry = Registry(windows.engine)
    inputs = TrainingInputs(DIGEST, ((window.id, window.sha256),), DIGEST, ("a",), reservoir)
    report = replace(make_training(), inputs=inputs, moments_sha256=moments)
    return registry.add_candidate(registry.version("chat", 1), DIGEST, 9, window.id, report)


def test_references_come_back_from_their_file() -> None:
    kept = (Kept("a", 1, "chat", 5.0), Kept("b", 2, "sql", 6.5))
    assert reservoirs.from_bytes(reservoirs.to_bytes(kept)) == kept


def test_the_newest_reservoir_before_a_window_is_that_of_the_last_run_that_named_one(windows: Windows) -> None:
    first, second, third, fourth = (window_of(windows, name) for name in "abcd")
    trained(windows, first, "")
    assert reservoirs.newest(windows.engine, "chat", second.id) is None
    trained(windows, second, "22" * 32)
    trained(windows, third, "")
    assert reservoirs.newest(windows.engine, "chat", second.id) is None
    assert reservoirs.newest(windows.engine, "chat", fourth.id) == Filled(second.id, "22" * 32)


def test_training_records_are_those_of_the_windows_between_and_no_holdout(windows: Windows) -> None:
    first, second, third = (window_of(windows, *names, holdout=names[0] + "h") for names in ("a", "bc", "d"))
    found = reservoirs.training_records(windows.engine, "chat", first.id, third.id, EVER)
    assert [(k.record_id, k.window_id, k.workload) for k in found] == [
        ("a", first.id, "code"), ("b", second.id, "code"), ("c", second.id, "code"),
    ]  # fmt: skip
    assert found[0].at == pytest.approx(first.created_at.timestamp())
    since_second = reservoirs.training_records(windows.engine, "chat", second.id, third.id, EVER)
    assert [k.record_id for k in since_second] == ["b", "c"]


def test_training_records_of_old_windows_are_left_out(windows: Windows) -> None:
    window = window_of(windows, "a")
    late = window.created_at + timedelta(seconds=1)
    assert reservoirs.training_records(windows.engine, "chat", 0, window.id + 1, late) == []


def test_another_drafters_records_are_not_seen(windows: Windows) -> None:
    make_drafter(Registry(windows.engine), "other")
    window = window_of(windows, "a")
    assert reservoirs.training_records(windows.engine, "other", 0, window.id + 1, EVER) == []


def test_records_that_were_purged_or_whose_window_was_deleted_are_not_there(windows: Windows) -> None:
    acme, other = make_record("a"), msgspec.structs.replace(make_record("b"), tenant="other")
    window = windows.keep("chat", (acme, other), ())
    assert window is not None
    windows.close(window, "promoted")
    deleted = window_of(windows, "c")
    kept = reservoirs.training_records(windows.engine, "chat", 0, deleted.id + 1, EVER)
    assert reservoirs.still_there(windows.engine, kept) == kept
    purge.finish(windows.engine, windows.blobs, [], purge.begin(windows.engine, "other", False, "test"))
    with windows.engine.begin() as connection:
        connection.execute(text(f"UPDATE feedback_window SET deleted_at = created_at WHERE id = {deleted.id}"))
    assert [k.record_id for k in reservoirs.still_there(windows.engine, kept)] == ["a"]


def test_more_references_than_a_query_takes_can_be_asked_for(windows: Windows) -> None:
    window = window_of(windows, *(f"r{n}" for n in range(1100)))
    kept = reservoirs.training_records(windows.engine, "chat", 0, window.id + 1, EVER)
    assert len(reservoirs.still_there(windows.engine, [*kept, Kept("gone", window.id, "code", 0.0)])) == 1100


def test_garbage_is_every_reservoir_but_the_last_and_no_moments_of_a_version_that_is_kept(
    windows: Windows, store: WeightsStore
) -> None:
    old, new, moments = (store.put(data).sha256 for data in (b"old", b"new", b"moments"))
    first, second = window_of(windows, "a"), window_of(windows, "b")
    trained(windows, first, old, moments)
    trained(windows, second, new)
    assert garbage.orphans(windows.engine, store, older_than_hours=-1) == [old]
