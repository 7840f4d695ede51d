"""What a run replays: bounded, from all earlier windows, the same again, and without what is gone."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine

from adapter.distil import DistilConfig
from storage import purge
from storage.decisions import TrainingInputs
from storage.records import FeedbackRecord
from storage.registry import Registry
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.storage.rows import DIGEST, make_drafter, make_record, make_training
from worker.reservoir import Replay, replay

CONFIG = DistilConfig(replay_records=10, reservoir_records=8)
NOTHING = Replay((), (), "")


@pytest.fixture
def windows(engine: Engine, tmp_path: Path) -> Windows:
    make_drafter(Registry(engine))
    return Windows(engine, WeightsStore(tmp_path / "weights"))


def named(workload: str, count: int, tenant: str = "acme") -> list[FeedbackRecord]:
    return [
        msgspec.structs.replace(make_record(f"{workload}-{n}"), workload=workload, tenant=tenant) for n in range(count)
    ]


def window_of(windows: Windows, records: list[FeedbackRecord]) -> Window:
    window = windows.keep("chat", tuple(records), ())
    assert window is not None
    windows.close(window, "promoted")
    return window


def update(windows: Windows, records: list[FeedbackRecord], config: DistilConfig = CONFIG) -> Replay:
    """A window and its run, which keeps in its row what it replayed."""
    window = window_of(windows, records)
    found = replay(window, windows, config)
    names = tuple((w.id, w.sha256) for w in (*found.windows, window))
    inputs = TrainingInputs(DIGEST, names, DIGEST, found.records, found.reservoir_sha256)
    registry = Registry(windows.engine)
    report = replace(make_training(), inputs=inputs)
    registry.add_candidate(registry.version("chat", 1), DIGEST, 9, window.id, report)
    return found


def workloads(found: Replay) -> Counter[str]:
    return Counter(record_id.rpartition("-")[0] for record_id in found.records)


def test_the_first_window_replays_nothing(windows: Windows) -> None:
    assert update(windows, named("chat", 3)) == NOTHING


def test_records_of_all_earlier_windows_are_replayed_the_workloads_in_equal_shares(windows: Windows) -> None:
    update(windows, named("sql", 30))
    for n in range(3):
        found = update(windows, named(f"chat.{n}", 4))
    assert workloads(found).keys() == {"sql", "chat.0", "chat.1"}
    assert sorted(workloads(found).values()) == [3, 3, 4]


def test_a_workload_that_has_not_come_for_long_is_still_replayed(windows: Windows) -> None:
    update(windows, named("sql", 30))
    for n in range(8):
        records = [msgspec.structs.replace(r, record_id=f"chat-{n}-{i}") for i, r in enumerate(named("chat", 12))]
        found = update(windows, records)
    assert sum(record_id.startswith("sql") for record_id in found.records) == 5
    assert sum(record_id.startswith("chat") for record_id in found.records) == 5


def test_the_same_window_replays_the_same_and_another_seed_does_not(windows: Windows) -> None:
    update(windows, named("sql", 30))
    window = window_of(windows, named("chat", 3))
    assert replay(window, windows, CONFIG) == replay(window, windows, CONFIG)
    assert replay(window, windows, CONFIG) != replay(window, windows, replace(CONFIG, seed=1))


def test_the_reservoir_holds_no_more_than_its_bound(windows: Windows) -> None:
    update(windows, named("sql", 30))
    found = update(windows, named("chat", 3), replace(CONFIG, replay_records=1000))
    assert workloads(found) == {"sql": 8}


def test_a_window_whose_run_named_no_reservoir_is_caught_up_with(windows: Windows) -> None:
    update(windows, named("sql", 4))
    update(windows, named("code", 4))
    window_of(windows, named("chat", 4))  # its run crashed
    found = update(windows, named("math", 4), replace(CONFIG, replay_records=100))
    assert workloads(found) == {"sql": 4, "code": 4, "chat": 4}


def test_without_the_file_of_the_last_reservoir_it_is_filled_again(windows: Windows) -> None:
    update(windows, named("sql", 4))
    lost = update(windows, named("code", 4)).reservoir_sha256
    windows.blobs.delete(lost)
    found = update(windows, named("math", 4), replace(CONFIG, replay_records=100))
    assert workloads(found) == {"sql": 4, "code": 4}


def test_what_is_older_than_its_age_is_replayed_no_more(windows: Windows) -> None:
    update(windows, named("sql", 4))
    window = window_of(windows, named("code", 4))
    later = replace(window, created_at=window.created_at + timedelta(hours=CONFIG.reservoir_hours + 1))
    assert replay(window, windows, CONFIG).records
    assert replay(later, windows, CONFIG) == NOTHING


def test_a_purged_tenants_records_are_replayed_no_more(windows: Windows) -> None:
    update(windows, named("sql", 4) + named("law", 4, tenant="secret"))
    update(windows, named("code", 4))
    purge.finish(windows.engine, windows.blobs, [], purge.begin(windows.engine, "secret", False, "test"))
    found = update(windows, named("math", 4), replace(CONFIG, replay_records=100))
    assert workloads(found) == {"sql": 4, "code": 4}


def test_a_window_whose_file_is_missing_is_passed_over(windows: Windows) -> None:
    lost = window_of(windows, named("sql", 4))
    window_of(windows, named("code", 4))
    windows.blobs.delete(lost.sha256)
    found = update(windows, named("math", 4))
    assert workloads(found) == {"code": 4}
    assert [w.id for w in found.windows] == [lost.id + 1]


def test_replay_can_be_turned_off(windows: Windows) -> None:
    update(windows, named("sql", 4))
    assert update(windows, named("code", 4), replace(CONFIG, replay_records=0)) == NOTHING
