"""Drift from the stream to a job: the housekeeper folds, notices, and rings before a window is full."""

from pathlib import Path

import msgspec
import pytest
import redis
from sqlalchemy import Engine

from storage import history
from storage.config import StorageConfig
from storage.drift import FALL, NOVEL, DriftStore
from storage.jobs import Jobs
from storage.records import FeedbackRecord, Round, encode, int32
from storage.registry import Registry
from storage.stream import FeedbackStream
from tests.worker.entries import chat, said
from worker.config import TriggerConfig
from worker.housekeeping import Housekeeper

TRIGGER = TriggerConfig(window_records=500, window_minimum=16)


@pytest.fixture
def housekeeper(engine: Engine, client: redis.Redis, tmp_path: Path) -> Housekeeper:
    chat(Registry(engine))
    return _housekeeper(engine, client, tmp_path)


def test_a_fall_rings_for_an_update_long_before_the_window_is_full(
    housekeeper: Housekeeper, stream: FeedbackStream, engine: Engine
) -> None:
    _send(stream, [_request(n, accepted=70) for n in range(60)])
    assert housekeeper.fold_history() == 60
    assert housekeeper.sweep() == []
    _send(stream, [_request(100 + n, accepted=30) for n in range(12)])
    assert housekeeper.fold_history() == 12
    (fall, novel) = DriftStore(engine).alarms("chat")
    assert (fall.finding.kind, novel.finding.kind) == (FALL, NOVEL)
    assert (fall.finding.before, fall.finding.after) == (pytest.approx(0.7), pytest.approx(0.3))
    (job,) = housekeeper.sweep()
    assert [j.id for j in Jobs(engine).recent()] == [job]


def test_with_the_trigger_off_a_fall_is_told_and_no_more(
    housekeeper: Housekeeper, stream: FeedbackStream, engine: Engine, client: redis.Redis, tmp_path: Path
) -> None:
    _send(stream, [_request(n, accepted=70 if n < 60 else 30) for n in range(72)])
    housekeeper.fold_history()
    assert DriftStore(engine).pending("chat")
    off = TriggerConfig(window_records=500, drift_trigger=False)
    assert _housekeeper(engine, client, tmp_path, off).sweep() == []


def test_a_restart_between_two_requests_changes_nothing(
    housekeeper: Housekeeper, stream: FeedbackStream, engine: Engine, client: redis.Redis, tmp_path: Path
) -> None:
    for n in range(0, 72, 8):
        _send(stream, [_request(m, accepted=70 if m < 60 else 30) for m in range(n, n + 8)])
        _housekeeper(engine, client, tmp_path).fold_history()
    assert [alarm.finding.kind for alarm in DriftStore(engine).alarms("chat")] == [FALL, NOVEL]


def test_a_record_that_comes_twice_is_seen_once(
    housekeeper: Housekeeper, stream: FeedbackStream, engine: Engine
) -> None:
    for _ in range(2):
        _send(stream, [_request(1, accepted=70)])
        housekeeper.fold_history()
    assert [view.requests for view in DriftStore(engine).series("chat")] == [1]


def test_unsound_records_neither_end_the_fold_nor_reach_the_history(
    housekeeper: Housekeeper, stream: FeedbackStream, engine: Engine
) -> None:
    sound = _request(1, accepted=70)
    nan = (msgspec.structs.replace(sound.rounds[0], draft_ms=float("nan")),)
    broken = [{"rounds": nan}, {"finished_at": 1e30}, {"workload": "a\x00b"}, {"output_ids": b"12345"}]
    bad = [msgspec.structs.replace(sound, record_id=f"bad{n}", **changes) for n, changes in enumerate(broken)]
    _send(stream, [*bad, sound])
    assert housekeeper.fold_history() == 1
    assert housekeeper.fold_history() == 0
    (row,) = history.history(engine, "chat")
    assert (row.requests, row.draft_ms) == (1, 1.0)


def _housekeeper(engine: Engine, client: redis.Redis, folder: Path, trigger: TriggerConfig = TRIGGER) -> Housekeeper:
    return Housekeeper(engine, client, StorageConfig(home=folder), trigger)


def _request(number: int, accepted: int) -> FeedbackRecord:
    """A hundred verified positions, of which this many were accepted."""
    rounds = [Round(1, 1, accepted, accepted, -1, 0.0, 1.0, 1.0)]
    rounds += [Round(accepted + 1 + n, 1, 1, 0, 5, 1.0, 0.0, 0.0) for n in range(100 - accepted)]
    return said(number, rounds=tuple(rounds), output_ids=int32([7] * 110))


def _send(stream: FeedbackStream, records: list[FeedbackRecord]) -> None:
    assert stream.append([encode(record) for record in records]) == []
