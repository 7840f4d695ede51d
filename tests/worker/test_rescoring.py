"""Re-scoring in the trainer: the target is in memory only while it is needed, and what was used is in the row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from sqlalchemy import Engine, text
from torch import Tensor

import worker.rescoring
from adapter.drafters.causal_lm import CausalLM
from adapter.rescore import RescoreConfig
from adapter.target import Target
from adapter.versions import Versions
from storage.records import FeedbackRecord, TeacherRows, int32
from storage.registry import Registry
from storage.weights import WeightsStore
from tests.adapter.feedback import served
from tests.circle import tiny_first
from tests.valkey_fixture import ValkeyServer
from tests.worker.environment import due_update, trainer_environ
from worker.learner import Learner
from worker.lineage import Gathered, TargetNeeded, taught
from worker.rescoring import Rescorer, reread

ALWAYS = RescoreConfig(teacher="rescored", rescore_share=1.0)


@dataclass
class Loads:
    """How often the target was loaded, and in which numbers."""

    target: Target
    asked: list[str] = field(default_factory=list)

    def __call__(self, dtype: str) -> Target:
        self.asked.append(dtype)
        return self.target


@pytest.fixture
def loads(target: Target) -> Loads:
    return Loads(target)


@pytest.fixture
def records(target: Target, answered: list[FeedbackRecord]) -> list[FeedbackRecord]:
    """Served; every other one is said to be sampled."""
    made = [served(tiny_first(target), answer) for answer in answered[:8]]
    return [msgspec.structs.replace(r, temperature=float(n % 2)) for n, r in enumerate(made)]


def test_the_target_is_loaded_once_when_it_is_needed_and_not_kept(loads: Loads, records: list[FeedbackRecord]) -> None:
    rescorer = Rescorer(loads, ALWAYS)
    with rescorer.reading():
        assert loads.asked == []
        rescorer.read(records[:4], ())
        rescorer.read(records[4:], ())
        assert rescorer.how() == {"tokens": 1024, "top_k": 64, "dtype": "fp32"}
        assert loads.asked == ["auto"]
    assert rescorer._target is None
    with rescorer.reading():
        rescorer.read(records, ())
    assert loads.asked == ["auto", "auto"]


def test_records_come_back_in_their_order_and_what_may_not_be_read_as_it_was(
    loads: Loads, records: list[FeedbackRecord]
) -> None:
    records[2] = msgspec.structs.replace(records[2], structured=True)
    read = Rescorer(loads, ALWAYS).read(records, (1,))
    assert [r.record_id for r in read.records] == [r.record_id for r in records]
    assert read.records[2] == records[2]
    assert read.hidden.keys() == {r.record_id for r in records} - {records[2].record_id}
    first = records[0]
    assert read.hidden[first.record_id].shape == (len(first.prompt) + len(first.output), 32)


def test_the_gate_gets_rows_everywhere_for_sampled_requests_and_needs_none_for_greedy_ones(
    loads: Loads, records: list[FeedbackRecord]
) -> None:
    seen = reread(records, (), Rescorer(loads, ALWAYS), lambda: None).records
    for before, after in zip(records, seen, strict=True):
        if before.greedy:
            assert after == before
        else:
            assert after.teacher.arrays()[0].tolist() == list(range(1, len(after.output)))
    greedy = [r for r in records if r.greedy]
    assert reread(greedy, (), Rescorer(loads, ALWAYS), lambda: None).records == greedy
    assert len(loads.asked) == 1, "for greedy requests alone the target stays where it is"


def test_with_taps_the_gate_gets_hidden_states_of_the_whole_text(loads: Loads, records: list[FeedbackRecord]) -> None:
    seen = reread(records, (1, 2), Rescorer(loads, RescoreConfig(rescore_share=1.0)), lambda: None)
    for record in records:
        assert seen.hidden[record.record_id].shape == (len(record.prompt) + len(record.output), 64)


def test_without_taps_and_as_the_settings_are_by_default_nothing_is_read(
    loads: Loads, records: list[FeedbackRecord]
) -> None:
    assert reread(records, (), Rescorer(loads, RescoreConfig()), lambda: None).records == records
    assert reread(records, (), None, lambda: None).records == records
    assert loads.asked == []


class Conditioned(CausalLM):
    """A drafter that says that it needs hidden states."""

    taps = (1,)


def test_a_drafter_that_needs_hidden_states_is_told_where_there_is_no_target(target: Target) -> None:
    drafter = Conditioned(tiny_first(target).config, target.embedding)
    inputs = Gathered(None, None, None, drafter, None)  # type: ignore[arg-type]
    with pytest.raises(TargetNeeded, match="learns from hidden states"):
        taught(inputs, None, None)  # type: ignore[arg-type]


class Lost(RuntimeError):
    """The lease."""


def test_a_lost_lease_ends_it(loads: Loads, records: list[FeedbackRecord]) -> None:
    calls: list[int] = []

    def should_stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Lost

    with pytest.raises(Lost):
        Rescorer(loads, ALWAYS).read(records, (), should_stop=should_stop)
    assert len(calls) == 3


@pytest.mark.parametrize(("teacher", "loaded"), [("logged", 0), ("rescored", 1)])
def test_the_row_says_what_taught_and_the_trainer_loads_the_target_only_to_rescore(
    target: Target, target_dir: Path, records: list[FeedbackRecord], engine: Engine, database_url: str,
    valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: str, loaded: int,
) -> None:  # fmt: skip
    """One update by a whole trainer, as it is rung for."""
    versions = Versions(WeightsStore(tmp_path / "weights"), target.files, target.embedding)
    job_id = due_update(target, engine, versions, valkey, records)
    loads: list[object] = []
    load: Callable[..., Target] = worker.rescoring.load
    monkeypatch.setattr(worker.rescoring, "load", lambda *given: loads.append(given) or load(*given))
    environ = {
        **trainer_environ(tmp_path, database_url, valkey, target_dir),
        "REDRAFT_DTYPE": "fp32",
        "REDRAFT_DEVICE": "cpu",
        "REDRAFT_WINDOW_RECORDS": str(len(records)),
        "REDRAFT_TEACHER": teacher,
        "REDRAFT_RESCORE_SHARE": "1",
        "REDRAFT_EPOCHS": "1",
    }
    Learner(environ).run(job_id)
    registry = Registry(engine)
    run = registry.training(registry.version("demo", 2))
    assert run is not None
    assert (run.teacher, len(loads)) == (teacher, loaded)
    assert torch.is_grad_enabled()
    assert isinstance(versions.load(registry.version("demo", 2), registry.drafter("demo")).head.weight, Tensor)


@pytest.mark.parametrize("kept_rows", [True, False])
def test_text_that_this_target_would_not_have_said_is_not_learnt_from(
    target: Target, records: list[FeedbackRecord], engine: Engine, database_url: str, valkey: ValkeyServer,
    tmp_path: Path, kept_rows: bool,
) -> None:  # fmt: skip
    """The engine's weights were replaced, or it verifies lossily, and the records do not say so."""
    versions = Versions(WeightsStore(tmp_path / "weights"), target.files, target.embedding)
    folder = target.files.path
    answers = [msgspec.structs.replace(r, temperature=0.0) for r in records]
    if not kept_rows:  # as of an engine that shows no logits; and another text than the target's
        none = TeacherRows(0, b"", b"", b"", b"")
        answers = [
            msgspec.structs.replace(r, teacher=none, output_ids=int32((r.output[::-1] + 3) % target.vocab_size))
            for r in answers
        ]
    job_id = due_update(target, engine, versions, valkey, answers)
    environ = {
        **trainer_environ(tmp_path, database_url, valkey, folder), "REDRAFT_DTYPE": "fp32", "REDRAFT_DEVICE": "cpu",
        "REDRAFT_WINDOW_RECORDS": str(len(records)), "REDRAFT_TEACHER": "rescored", "REDRAFT_RESCORE_SHARE": "1",
        "REDRAFT_EPOCHS": "1",
    }  # fmt: skip
    Learner(environ).run(job_id)
    assert len(Registry(engine).versions("demo")) == (2 if kept_rows else 1)
    with engine.connect() as connection:
        ((outcome, reason),) = connection.execute(text("SELECT outcome, reason FROM training_run")).all()
    assert outcome == ("trained" if kept_rows else "failed")
    assert kept_rows or "greedy tokens are not what this target would have said" in reason
