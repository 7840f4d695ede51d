"""The serving engine as the teacher: its rows are the target's, and its own requests go first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import Engine, select

from adapter.rescore import rescore
from adapter.target import Target, TargetConfig, load
from adapter.versions import Versions
from storage.database import reading
from storage.records import FeedbackRecord
from storage.registry import Registry
from storage.tables import TrainingRow
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.adapter.feedback import served
from tests.circle import tiny_first
from tests.tiny import tiny_target_dir
from tests.valkey_fixture import ValkeyServer
from tests.worker.environment import due_update, trainer_environ
from tests.worker.scoring_engine import ScoringEngine, scoring_engine
from worker.engine_http import load_of
from worker.engine_teacher import Clock, EngineTeacher, EngineTeacherConfig
from worker.learner import Learner
from worker.reproduce import IDENTICAL, Lineage, reproduce

QUICK = EngineTeacherConfig(teacher_tokens=1e9)


@dataclass
class Time:
    """A clock that only sleeping moves; `on_sleep` is what happens meanwhile."""

    seconds: float = 0.0
    slept: float = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds, self.slept = self.seconds + seconds, self.slept + seconds


@pytest.fixture
def engine_of_target(target: Target) -> Iterator[ScoringEngine]:
    with scoring_engine(target) as serving:
        yield serving


@pytest.fixture
def records(target: Target, answered: list[FeedbackRecord]) -> list[FeedbackRecord]:
    """Served, with rows at refusals; every other one is said to be sampled."""
    made = [served(tiny_first(target), answer) for answer in answered[:6]]
    return [msgspec.structs.replace(r, temperature=float(n % 2)) for n, r in enumerate(made)]


def teacher(serving: ScoringEngine, top_k: int = 16, time: Time | None = None, **changes: object) -> EngineTeacher:
    time = time or Time()
    config = replace(QUICK, teacher_url=serving.url, **changes)  # type: ignore[arg-type]
    return EngineTeacher(config, top_k, Clock(time.now, time.sleep))


def test_its_rows_are_those_of_the_target_at_every_position_that_is_proposed_for(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    found = teacher(engine_of_target).read(records, target.vocab_size)
    again = {r.record.record_id: r.record for r in rescore(target, records, top_k=16)}
    for record in found:
        (positions, ids, log_probs, tail) = record.teacher.arrays()
        (wanted, their_ids, their_log_probs, their_tail) = again[record.record_id].teacher.arrays()
        assert positions.tolist() == wanted.tolist() == list(range(1, len(record.output)))
        assert (ids == their_ids).mean() > 0.99
        np.testing.assert_allclose(log_probs, their_log_probs, atol=0.01)
        np.testing.assert_allclose(np.exp(tail), np.exp(their_tail), atol=1e-4)
    assert [r.record_id for r in found] == [r.record_id for r in records]


def test_it_asks_for_no_more_alternatives_than_the_engine_gives(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    found = teacher(engine_of_target, top_k=64).read(records, target.vocab_size)
    assert {record.teacher.top_k for record in found} == {20}


def test_it_steps_back_while_the_engine_is_busy_and_goes_on_when_it_is_not(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.running = 1

    class Quieter(Time):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            engine_of_target.running = 0 if self.slept > 10 else 1

    time = Quieter()
    found = teacher(engine_of_target, time=time).read(records, target.vocab_size)
    assert time.slept > 10
    assert all(len(record.teacher.positions) // 4 == len(record.output) - 1 for record in found)


@pytest.mark.parametrize(("running", "waiting"), [(3, 0), (0, 1)])
def test_what_the_patience_did_not_reach_stays_as_it_was(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord], running: int, waiting: int
) -> None:
    engine_of_target.running, engine_of_target.waiting = running, waiting
    time = Time()
    found = teacher(engine_of_target, time=time, teacher_busy=2, teacher_patience=60.0).read(records, target.vocab_size)
    assert found == records
    assert engine_of_target.asked == []
    assert time.slept == pytest.approx(60.0)


def test_as_many_running_requests_as_are_allowed_are_not_busy(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.running = 2
    found = teacher(engine_of_target, teacher_busy=2).read(records, target.vocab_size)
    assert found != records


def test_it_asks_for_a_bounded_number_of_tokens_a_second(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    time, tokens = Time(), [len(r.prompt) + len(r.output) for r in records]
    teacher(engine_of_target, time=time, teacher_tokens=10.0).read(records, target.vocab_size)
    assert time.slept == pytest.approx(sum(tokens[:-1]) / 10.0)


def test_an_sglang_server_is_asked_in_its_own_way(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    of_vllm = teacher(engine_of_target).read(records, target.vocab_size)
    engine_of_target.scores, engine_of_target.sglang = False, True
    assert teacher(engine_of_target).read(records, target.vocab_size) == of_vllm
    assert engine_of_target.asked[-1]["sampling_params"]["max_new_tokens"] == 0


def test_an_engine_that_gives_none_is_not_asked_again(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.scores = False
    assert teacher(engine_of_target).read(records, target.vocab_size) == records
    assert len(engine_of_target.asked) == 2, "for 16 and for 5 alternatives"


def test_an_engine_that_fails_for_a_while_is_asked_again_and_what_it_refuses_is_left(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.failures = [200, 503, 429, 200, 400]  # the first is to the question what it can do
    found = teacher(engine_of_target).read(records, target.vocab_size)
    assert [after == before for after, before in zip(found, records, strict=True)] == [False, True, *[False] * 4]


def test_the_pace_holds_nothing_up_once_the_patience_is_over(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.failures = [200, 200, *[503] * 100]
    time = Time()
    found = teacher(engine_of_target, time=time, teacher_tokens=1.0, teacher_patience=60.0).read(
        records, target.vocab_size
    )
    assert [after == before for after, before in zip(found, records, strict=True)] == [False, *[True] * 5]
    assert time.slept == pytest.approx(60.0)


def test_an_engine_that_is_away_ends_nothing(target: Target, records: list[FeedbackRecord]) -> None:
    time = Time()
    config = EngineTeacherConfig(teacher_url="http://127.0.0.1:1", teacher_patience=30.0)
    assert EngineTeacher(config, 16, Clock(time.now, time.sleep)).read(records, target.vocab_size) == records
    assert EngineTeacher(EngineTeacherConfig(), 16).read(records, target.vocab_size) == records
    assert EngineTeacher(EngineTeacherConfig(teacher_url="vllm:8000"), 16).read(records, target.vocab_size) == records


def test_another_target_than_the_one_that_answered_teaches_nothing_of_greedy_requests(
    target: Target, records: list[FeedbackRecord], tmp_path: Path
) -> None:
    other = load(TargetConfig(str(tiny_target_dir(tmp_path / "o", seed=1, layers=3)), "fp32", "cpu", tmp_path))
    with scoring_engine(other) as serving:
        found = teacher(serving).read(records, target.vocab_size)
    assert [r for r in found if r.greedy] == [r for r in records if r.greedy]


class Lost(RuntimeError):
    """The lease."""


def test_a_lost_lease_ends_it_though_the_engine_is_busy(
    engine_of_target: ScoringEngine, target: Target, records: list[FeedbackRecord]
) -> None:
    engine_of_target.waiting = 1
    calls: list[int] = []

    def should_stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Lost

    with pytest.raises(Lost):
        teacher(engine_of_target).read(records, target.vocab_size, should_stop)


def test_the_load_of_an_engine_is_read_from_its_own_metrics() -> None:
    assert load_of('vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n') == (3, 0)
    assert load_of("sglang:num_running_reqs 1\nsglang:num_queue_reqs 4\n") == (1, 4)
    assert load_of("llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n") == (1, 2)
    assert load_of("up 1\n") == (0, 0)


def taught_by(serving: ScoringEngine, records: list[FeedbackRecord]) -> dict[str, str]:
    return {
        "REDRAFT_WINDOW_RECORDS": str(len(records)),
        "REDRAFT_EPOCHS": "1",
        "REDRAFT_TEACHER": "engine",
        "REDRAFT_TEACHER_URL": serving.url,
        "REDRAFT_RESCORE_TOP_K": "12",
        "REDRAFT_TEACHER_TOKENS": "1000000",
    }


def test_a_run_that_failed_says_that_the_engine_taught_it(
    engine_of_target: ScoringEngine, target: Target, target_dir: Path, records: list[FeedbackRecord], engine: Engine,
    database_url: str, valkey: ValkeyServer, tmp_path: Path,
) -> None:  # fmt: skip
    versions = Versions(WeightsStore(tmp_path / "weights"), target.files, target.embedding)
    job_id = due_update(target, engine, versions, valkey, records)
    environ = trainer_environ(tmp_path, database_url, valkey, target_dir)
    too_fast = {"REDRAFT_LEARNING_RATE": "1e30", "REDRAFT_WARM_UP": "0", "REDRAFT_BATCH_TOKENS": "32"}
    Learner({**environ, **taught_by(engine_of_target, records), **too_fast}).run(job_id)
    with reading(engine) as session:
        (run,) = session.execute(select(TrainingRow.outcome, TrainingRow.teacher)).tuples()
    assert run == ("failed", "engine")


def test_a_trainer_keeps_the_engines_rows_in_the_window_so_that_the_version_can_be_made_again(
    engine_of_target: ScoringEngine, target: Target, target_dir: Path, records: list[FeedbackRecord], engine: Engine,
    database_url: str, valkey: ValkeyServer, tmp_path: Path,
) -> None:  # fmt: skip
    """One update by a whole trainer, as it is rung for."""
    blobs = WeightsStore(tmp_path / "weights")
    versions = Versions(blobs, target.files, target.embedding)
    job_id = due_update(target, engine, versions, valkey, records)
    environ = trainer_environ(tmp_path, database_url, valkey, target_dir)
    Learner({**environ, **taught_by(engine_of_target, records)}).run(job_id)
    registry, windows = Registry(engine), Windows(engine, blobs)
    version = registry.version("demo", 2)
    run = registry.training(version)
    assert run is not None
    assert run.teacher == "engine"
    assert version.window_id is not None
    kept = windows.records(windows.window(version.window_id))
    assert {r.teacher.top_k for r in (*kept.training, *kept.holdout)} == {12}
    again = reproduce(Lineage(registry, windows, versions), registry.drafter("demo"), 2)
    assert again.outcome == IDENTICAL, again.differences
