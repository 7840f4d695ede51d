"""A target that changes under a drafter: the worker learns nothing more for it, and goes on for the new one if told."""

from pathlib import Path

import msgspec
import pytest
from redis import Redis
from sqlalchemy import Engine

from adapter.target import Target, TargetConfig, fetch, load_embedding
from adapter.versions import Versions
from storage import history, left_out
from storage.config import StorageConfig
from storage.jobs import Jobs
from storage.records import FeedbackRecord, encode
from storage.registry import Registry
from storage.stream import HISTORY, FeedbackStream
from storage.target_changes import notice, settle, stopped
from storage.weights import WeightsStore
from tests.circle import tiny_first
from tests.storage.rows import make_drafter, make_record, make_round
from tests.tiny import tiny_target_dir
from tests.valkey_fixture import ValkeyServer
from tests.worker.environment import trainer_environ
from worker.config import TriggerConfig
from worker.housekeeping import OTHER_TARGET, Housekeeper
from worker.learner import Learner
from worker.succession import Succession


@pytest.fixture
def housekeeper(engine: Engine, redis: Redis, tmp_path: Path) -> Housekeeper:
    make_drafter(Registry(engine))
    return Housekeeper(engine, redis, StorageConfig(home=tmp_path), TriggerConfig(window_records=1, window_minimum=1))


def said(redis: Redis, name: str, target: str, at: float) -> FeedbackRecord:
    """A record of `chat` on the stream, made by that target."""
    record = make_record(name, (make_round(1, 4, 2),), finished_at=at)
    record = msgspec.structs.replace(record, target_fingerprint=target, source="sidecar")
    FeedbackStream(redis, "chat").append([encode(record)])
    return record


def test_records_of_another_target_stop_the_drafter_and_are_in_no_figure_of_its_versions(
    engine: Engine, housekeeper: Housekeeper, redis: Redis
) -> None:
    said(redis, "before", "target-1", 1000.0)
    said(redis, "after", "target-2", 2000.0)
    assert housekeeper.fold_history() == 1
    assert [row.requests for row in history.by_version(engine, "chat")] == [1]
    assert [(kept.guard, kept.records) for kept in left_out.totals(engine, "chat")] == [(OTHER_TARGET, 1)]
    assert FeedbackStream(redis, "chat").waiting(HISTORY).count == 0
    change = stopped(engine)["chat"]
    assert (change.seen, change.seen_by, change.witness) == ("target-2", "host sidecar", "records")


def test_nothing_is_due_for_a_stopped_drafter_until_its_target_is_back(
    engine: Engine, housekeeper: Housekeeper, redis: Redis
) -> None:
    said(redis, "other", "target-2", 1000.0)
    housekeeper.fold_history()
    assert housekeeper.sweep() == []
    assert Jobs(engine).recent() == []
    assert housekeeper.target_changed
    said(redis, "own", "target-1", 2000.0)
    housekeeper.fold_history()
    assert stopped(engine) == {}
    assert len(housekeeper.sweep()) == 1
    assert not housekeeper.target_changed


def test_a_retired_drafters_late_records_of_another_target_stop_nothing(
    engine: Engine, housekeeper: Housekeeper, redis: Redis
) -> None:
    Registry(engine).retire_drafter("chat", "tester")
    said(redis, "late", "target-2", 1000.0)
    housekeeper.fold_history()
    assert stopped(engine) == {}


def test_a_trainer_with_another_target_stops_its_job_once_and_says_why(
    engine: Engine, database_url: str, target_dir: Path, tmp_path: Path, valkey: ValkeyServer
) -> None:
    make_drafter(Registry(engine), "chat", "the target before")
    learner = Learner(trainer_environ(tmp_path, database_url, valkey, target_dir))
    job = Jobs(engine).request("adapt", "chat")
    assert job is not None
    learner.run(job.id)
    (done,) = Jobs(engine).recent()
    assert done.state == "failed"
    assert "chat was made for target the target b" in done.reason
    assert stopped(engine)["chat"].witness == "trainer"


@pytest.fixture
def other_dir(tmp_path: Path) -> Path:
    """The target as if it had been trained further: other weights, the same shapes and tokenizer."""
    return tiny_target_dir(tmp_path / "other", seed=1, layers=3)


@pytest.fixture
def learnt(target: Target, engine: Engine, tmp_path: Path) -> Registry:
    """A drafter `chat` of the target, with weights."""
    registry, drafter, files = Registry(engine), tiny_first(target), target.files
    blob = Versions(WeightsStore(tmp_path / "weights"), files, target.embedding).save(drafter)
    prints = files.fingerprint, files.tokenizer_fingerprint
    registry.create_drafter("chat", "causal_lm", *prints, drafter.config.to_dict(), blob.sha256, blob.size, "test")
    return registry


def weights_of(folder: Path, target: Path) -> tuple[WeightsStore, Versions]:
    files, blobs = fetch(TargetConfig(target=str(target), cache=folder / "cache")), WeightsStore(folder / "weights")
    return blobs, Versions(blobs, files, load_embedding(files))


def test_a_new_lineage_goes_on_from_the_live_weights_and_is_chosen_in_the_old_ones_place(
    learnt: Registry, engine: Engine, other_dir: Path, tmp_path: Path, target: Target
) -> None:
    blobs, weights = weights_of(tmp_path, other_dir)
    fingerprint = weights.files.fingerprint
    notice(engine, "chat", fingerprint, "server", "server host:1")
    succession = Succession(learnt, blobs, weights)
    assert succession.go_on() == [f"chat-{fingerprint[:6]}"]
    made = learnt.choose("chat", fingerprint)
    assert (made.name, made.kind, made.target_fingerprint) == (f"chat-{fingerprint[:6]}", "causal_lm", fingerprint)
    new = weights.load(learnt.live(made.name), made)
    old = Versions(blobs, target.files, target.embedding).load(learnt.live("chat"), learnt.drafter("chat"))
    assert all(bool((new.own_tensors()[name] == tensor).all()) for name, tensor in old.own_tensors().items())
    assert learnt.choose("chat", target.files.fingerprint).name == "chat"
    assert succession.go_on() == [], "once"


@pytest.mark.parametrize("setting", ["off", "auto"])
def test_the_trainer_makes_a_successor_only_where_the_settings_say_so(
    learnt: Registry, engine: Engine, database_url: str, other_dir: Path, tmp_path: Path, valkey: ValkeyServer,
    setting: str,
) -> None:  # fmt: skip
    environ = trainer_environ(tmp_path, database_url, valkey, other_dir)
    learner = Learner({**environ, "REDRAFT_NEW_LINEAGE": setting})
    fingerprint = fetch(TargetConfig(target=str(other_dir), cache=tmp_path / "cache")).fingerprint
    notice(engine, "chat", fingerprint, "server", "server host:1")
    learner.go_on()
    assert len(learnt.drafters()) == (2 if setting == "auto" else 1)
    assert bool(stopped(engine)["chat"].successor) == (setting == "auto")


def test_a_target_with_other_shapes_gets_no_successor_by_itself(
    learnt: Registry, engine: Engine, tmp_path: Path
) -> None:
    wider = tiny_target_dir(tmp_path / "wider", seed=1, layers=3, hidden=64)
    blobs, weights = weights_of(tmp_path, wider)
    notice(engine, "chat", weights.files.fingerprint, "server", "server host:1")
    assert Succession(learnt, blobs, weights).go_on() == []
    assert [drafter.name for drafter in learnt.drafters()] == ["chat"]


def test_a_trainer_with_the_right_target_takes_back_what_a_wrong_one_said(
    learnt: Registry, engine: Engine, database_url: str, target_dir: Path, tmp_path: Path, valkey: ValkeyServer
) -> None:
    notice(engine, "chat", "another", "trainer", "the trainer of yesterday")
    Learner(trainer_environ(tmp_path, database_url, valkey, target_dir))
    assert stopped(engine) == {}
    assert not settle(engine, "chat", "tester")
