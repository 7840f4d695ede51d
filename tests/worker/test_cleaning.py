"""What the housekeeper deletes by the hour: expired weights, windows and servers, and what a purge left."""

import time
from pathlib import Path

import pytest
from redis import Redis
from sqlalchemy import Engine, text

from storage import purge
from storage.config import StorageConfig
from storage.records import encode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.retention import RetentionConfig
from storage.servers import Servers
from storage.stream import ADAPT, FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import make_candidate, make_drafter, make_record
from worker.config import TriggerConfig
from worker.housekeeping import Housekeeper

YESTERDAY = time.time() - 86_400


@pytest.fixture
def storage(tmp_path: Path) -> StorageConfig:
    return StorageConfig(home=tmp_path, retention_hours=0.0001)


@pytest.fixture
def housekeeper(engine: Engine, redis: Redis, storage: StorageConfig) -> Housekeeper:
    make_drafter(Registry(engine))
    return Housekeeper(engine, redis, storage, TriggerConfig(), kept=RetentionConfig(versions_kept=1))


def test_a_purge_that_a_crash_cut_short_is_finished(engine: Engine, housekeeper: Housekeeper, redis: Redis) -> None:
    FeedbackStream(redis, "chat").append([encode(make_record("a", finished_at=YESTERDAY))])
    purge.begin(engine, "acme", False, "tester")
    housekeeper.collect_garbage()
    assert purge.unfinished(engine) == []
    assert FeedbackStream(redis, "chat").waiting(ADAPT).count == 0


def test_records_that_come_after_their_purge_are_deleted(engine: Engine, redis: Redis, tmp_path: Path) -> None:
    make_drafter(Registry(engine))
    purge.finish(engine, WeightsStore(tmp_path / "weights"), [], purge.begin(engine, "acme", False, "tester"))
    FeedbackStream(redis, "chat").append([encode(make_record("late", finished_at=YESTERDAY))])
    Housekeeper(engine, redis, StorageConfig(home=tmp_path), TriggerConfig()).collect_garbage()
    assert FeedbackStream(redis, "chat").waiting(ADAPT).count == 0


def test_without_redis_the_rest_is_cleaned_all_the_same(engine: Engine, storage: StorageConfig) -> None:
    make_drafter(Registry(engine))
    purge.begin(engine, "acme", False, "tester")
    servers = Servers(engine)
    servers.beat("gone", "reference", "chat", 1, 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE server SET last_seen = '2001-01-01 00:00:00+00:00'"))
    with consume("redis://127.0.0.1:1/0") as away:
        Housekeeper(engine, away, storage, TriggerConfig()).collect_garbage()
    assert servers.live("chat", within_seconds=1e9) == []
    assert len(purge.unfinished(engine)) == 1


def test_weights_and_windows_past_their_retention_are_deleted(
    engine: Engine, housekeeper: Housekeeper, storage: StorageConfig
) -> None:
    registry, store = Registry(engine), WeightsStore(storage.weights_folder)
    first = registry.live("chat")
    for name in "abc":
        make_candidate(registry, store, first, name)
    window = Windows(engine, store).recent("chat", 1)[0]
    with engine.begin() as connection:
        connection.execute(text("UPDATE feedback_window SET created_at = '2001-01-01 00:00:00+00:00'"))
    time.sleep(0.5)  # longer than the store's files are spared
    assert housekeeper.collect_garbage() == 3
    assert not store.has(window.sha256)
    states = {s.version.number: s.weights_deleted for s in registry.versions("chat")}
    assert states == {1: False, 2: True, 3: True, 4: False}


def test_the_stream_of_a_retired_drafter_is_trimmed_and_makes_no_job(
    engine: Engine, redis: Redis, tmp_path: Path
) -> None:
    """Its age is bounded like any other's: it holds what clients said."""
    make_drafter(Registry(engine))
    make_drafter(Registry(engine), "retired")
    Registry(engine).retire_drafter("retired", "tester")
    stream = FeedbackStream(redis, "retired")
    stream.append([encode(make_record(f"r{n}")) for n in range(20)])
    time.sleep(0.5)
    kept_for = StorageConfig(home=tmp_path, retention_hours=0.0001)
    assert Housekeeper(engine, redis, kept_for, TriggerConfig(window_records=1)).sweep() == []
    assert stream.newest(20) == ()
