"""From the stream to a window: when, why, and without what the guards left out; nothing is lost on the way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage import left_out
from storage.drift import FALL, DriftStore, Finding, Revision
from storage.jobs import Jobs, Lease
from storage.records import FeedbackRecord, encode, int32
from storage.registry import Drafter, Registry
from storage.stream import ADAPT, FeedbackStream, Waiting
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.worker.entries import VOCABULARY, chat, copies, ids, said
from worker.collect import AGE, DRIFT, SIZE, collect, due
from worker.config import TriggerConfig

CONFIG = TriggerConfig(window_records=20, window_minimum=8, window_age_seconds=900, holdout_share=0.25)
FELL = Finding(FALL, "code", "greedy", 1, 0.7, 0.4, 9, "acceptance probability of code fell")
Collect = Callable[..., Window | None]


@pytest.fixture
def drafter(engine: Engine) -> Drafter:
    return chat(Registry(engine))


@pytest.fixture
def windows(engine: Engine, tmp_path: Path) -> Windows:
    return Windows(engine, WeightsStore(tmp_path / "weights"))


@pytest.fixture
def lease(engine: Engine, drafter: Drafter) -> Lease:
    job = Jobs(engine).request("adapt", drafter.name)
    assert job is not None
    lease = Jobs(engine).take(job.id, "test", 60)
    assert lease is not None
    return lease


@pytest.fixture
def collected(stream: FeedbackStream, windows: Windows, drafter: Drafter, lease: Lease) -> Collect:
    def run(records: list[FeedbackRecord], config: TriggerConfig = CONFIG) -> Window | None:
        stream.append([encode(record) for record in records])
        return collect(stream, windows, drafter, VOCABULARY, config, lease)

    return run


@pytest.mark.parametrize(
    ("count", "age", "alarmed", "cause"),
    [
        (20, 0, False, SIZE), (20, 900, True, SIZE),
        (8, 900, False, AGE), (8, 899, False, ""), (7, 5000, False, ""),
        (8, 0, True, DRIFT), (7, 5000, True, ""),
    ],
)  # fmt: skip
def test_size_or_age_or_drift_starts_an_update(count: int, age: float, alarmed: bool, cause: str) -> None:
    assert due(Waiting(count, age), CONFIG, alarmed) == cause


def test_drift_starts_nothing_where_that_is_off() -> None:
    assert due(Waiting(8, 0), replace(CONFIG, drift_trigger=False), alarmed=True) == ""


def test_the_window_tells_its_cause_and_is_split_by_request(collected: Collect, windows: Windows) -> None:
    window = collected([said(n) for n in range(20)])
    assert window is not None
    assert (window.cause, window.training + window.holdout, window.left_out) == (SIZE, 20, {})
    assert window.holdout > 0


def test_an_alarm_starts_a_window_before_it_is_full_and_is_answered_by_it(collected: Collect, engine: Engine) -> None:
    drift = DriftStore(engine)
    assert collected([said(n) for n in range(8)]) is None
    drift.revise("chat", lambda known: Revision({}, (FELL,)))
    window = collected([])
    assert window is not None
    assert window.cause == DRIFT
    assert [alarm.window_id for alarm in drift.alarms("chat")] == [window.id]


def test_one_request_repeated_makes_no_window_and_its_copies_are_counted(
    collected: Collect, stream: FeedbackStream, engine: Engine
) -> None:
    assert collected(copies(said(1), 20)) is None
    assert [(f.guard, f.records) for f in left_out.totals(engine, "chat")] == [("repeated", 17)]
    assert stream.waiting(ADAPT).count == 3  # the copies that may stay await others


def test_too_few_sound_records_stay_until_more_have_come(
    collected: Collect, stream: FeedbackStream, windows: Windows
) -> None:
    assert collected([*copies(said(1), 20), *(said(n) for n in range(10, 14))]) is None
    assert stream.waiting(ADAPT).count == 7
    assert collected([said(n) for n in range(20, 33)]) is not None
    (window,) = windows.recent("chat", 5)
    found = windows.records(window)
    assert len(ids([*found.training, *found.holdout])) == 20
    assert stream.waiting(ADAPT).count == 0


def test_a_window_says_what_was_left_out_of_it(collected: Collect, windows: Windows, stream: FeedbackStream) -> None:
    bad = [said(n, output_ids=int32([VOCABULARY, 1])) for n in range(100, 103)]
    private = [said(200, train=False)]
    window = collected([*bad, *private, *copies(said(1), 6), *(said(n) for n in range(10, 20))])
    assert window is not None
    assert window.left_out == {"quarantined": 3, "not_learnable": 1, "repeated": 3}
    assert windows.window(window.id).left_out == window.left_out
    assert window.training + window.holdout == 13
    assert stream.client.xlen(stream.quarantine_key) == 3
    assert stream.waiting(ADAPT).count == 0


def test_a_flooded_stream_is_searched_for_the_others_and_what_was_only_passed_over_stays(
    collected: Collect, windows: Windows, stream: FeedbackStream
) -> None:
    flood = [said(n, workload="flood") for n in range(60)]
    quiet = [said(100 + n, workload="quiet") for n in range(6)]
    mixed = [r for n, other in enumerate(quiet) for r in (*flood[10 * n : 10 * n + 10], other)]
    window = collected(mixed)
    assert window is not None
    found = windows.records(window)
    workloads = [r.workload for r in (*found.training, *found.holdout)]
    assert (workloads.count("flood"), workloads.count("quiet")) == (15, 5)
    assert window.left_out == {"crowding": 4}
    assert stream.waiting(ADAPT).count == 66 - 20 - 4


def test_nothing_sound_is_quarantined_and_the_next_window_is_whole(collected: Collect, stream: FeedbackStream) -> None:
    assert collected([said(n, finished_at=float("nan")) for n in range(20)]) is None
    assert stream.client.xlen(stream.quarantine_key) == 20
    assert collected([said(n) for n in range(20)]) is not None


def test_a_window_that_a_crash_left_undecided_comes_first(collected: Collect) -> None:
    first = collected([said(n) for n in range(20)])
    assert collected([said(n) for n in range(50, 70)]) == first
