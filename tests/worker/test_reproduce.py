"""Reproduction: a chain of updates comes out bit for bit, and what stands in the way is said."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from sqlalchemy import Engine, select, text

import worker.reproduce
from adapter.distil import DistilConfig
from adapter.distributed import DistributedConfig, Launch, launch
from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.shared import Shared
from adapter.gate import GateConfig
from adapter.rescore import RescoreConfig
from adapter.target import Target
from adapter.versions import Versions
from storage import audit, garbage, purge, retention
from storage.database import transaction
from storage.jobs import Jobs
from storage.records import FeedbackRecord
from storage.registry import Drafter, Registry
from storage.retention import RetentionConfig
from storage.stream import FeedbackStream
from storage.tables import TrainingRow
from storage.weights import WeightsStore
from storage.windows import Windows, packed
from tests.adapter.feedback import served
from tests.circle import make_drafter
from worker.config import TriggerConfig
from worker.pipeline import AdaptConfig, Stores, adapt_once
from worker.reproduce import Lineage, reproduce
from worker.rescoring import Load, Rescorer

SETTINGS = DistilConfig(epochs=3, batch_tokens=128, learning_rate=3e-3, carry_moments=True, replay_records=4)
CONFIG = AdaptConfig(TriggerConfig(), SETTINGS, GateConfig())
NO_STREAM = cast(FeedbackStream, None)  # a window that is open already is taken without a look at the stream


@dataclass
class Chain:
    """A drafter whose versions 2 and 3 were each trained on a window of their own; 3 replayed some of 2's."""

    database: Engine
    store: WeightsStore
    versions: Versions
    drafter: Drafter
    windows: Windows
    rescorer: Rescorer | None = None  # as the trainer has it
    launch: Launch | None = None
    load: Load | None = None  # as `redraft reproduce` has it

    @property
    def registry(self) -> Registry:
        return Registry(self.database)

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.registry, self.windows, self.versions, self.load)

    def update(self, training: list[FeedbackRecord]) -> None:
        """One update as the trainer makes it, made live whatever the gate says."""
        holdout = tuple(msgspec.structs.replace(r, record_id=f"held-{r.record_id}") for r in training[:2])
        assert self.windows.keep("demo", tuple(training), holdout) is not None
        jobs = Jobs(self.database)
        job = jobs.request("adapt", "demo")
        assert job is not None
        lease = jobs.take(job.id, "test", 60)
        assert lease is not None
        stores = Stores(
            NO_STREAM, self.windows, Registry(self.database, lease), self.versions, lease, self.rescorer, self.launch
        )
        adapt_once(self.drafter, stores, CONFIG, lambda: None)
        jobs.finish(lease, "done")
        newest = self.registry.versions("demo")[-1].version
        self.registry.promote(newest, self.registry.live("demo"), "test", "the next of the chain")


@pytest.fixture
def beginning(engine: Engine, target: Target, tmp_path: Path) -> Chain:
    """Version 1 alone."""
    return begun(engine, target, tmp_path, CausalLM.from_target(target.model, 1, torch.arange(200)))


def begun(engine: Engine, target: Target, folder: Path, first: LearntDrafter) -> Chain:
    store = WeightsStore(folder / "weights")
    versions = Versions(store, target.files, target.embedding)
    make_drafter(target, engine, versions, first)
    return Chain(engine, store, versions, Registry(engine).drafter("demo"), Windows(engine, store))


@pytest.fixture
def served_records(target: Target, answered: list[FeedbackRecord]) -> list[FeedbackRecord]:
    first = CausalLM.from_target(target.model, 1, torch.arange(200))
    return [served(first, r, tenant="acme" if n % 4 == 0 else "other") for n, r in enumerate(answered)]


@pytest.fixture
def chain(beginning: Chain, served_records: list[FeedbackRecord]) -> Chain:
    beginning.update(served_records[:8])
    beginning.update(served_records[8:])
    return beginning


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_chain_of_two_updates_comes_out_bit_for_bit(chain: Chain) -> None:
    torch.manual_seed(5)
    second, third = (reproduce(chain.lineage, chain.drafter, number) for number in (2, 3))
    assert (second.outcome, third.outcome) == ("identical", "identical")
    assert third.rebuilt_sha256 == chain.registry.version("demo", 3).weights_sha256 != second.rebuilt_sha256
    run = chain.registry.training(chain.registry.version("demo", 3))
    assert run is not None
    assert run.inputs is not None
    assert (len(run.inputs.windows), run.replayed) == (2, 4)
    assert run.inputs.moments_sha256, "the second update went on from the optimiser's state of the first"


def test_a_run_that_learnt_from_rescored_records_comes_out_bit_for_bit(
    beginning: Chain, served_records: list[FeedbackRecord], target: Target
) -> None:
    beginning.rescorer = Rescorer(lambda dtype: target, RescoreConfig(teacher="rescored", rescore_tokens=200))
    beginning.update(served_records[:8])
    beginning.update(served_records[8:])
    run = beginning.registry.training(beginning.registry.version("demo", 3))
    assert run is not None
    assert run.inputs is not None
    assert (run.teacher, run.inputs.rescored) == ("rescored", {"tokens": 200, "top_k": 64, "dtype": "fp32"})
    asked = []
    beginning.load = lambda dtype: asked.append(dtype) or target
    assert [reproduce(beginning.lineage, beginning.drafter, n).outcome for n in (2, 3)] == ["identical"] * 2
    assert asked == ["fp32", "fp32"], "in the numbers that the run had, whatever the settings say now"
    beginning.load = None
    without = reproduce(beginning.lineage, beginning.drafter, 3)
    assert (without.outcome, "scored again by the target" in without.differences[0]) == ("impossible", True)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_drafter_that_reads_hidden_states_learns_and_is_judged_by_them_and_comes_out_bit_for_bit(
    engine: Engine, target: Target, tmp_path: Path, served_records: list[FeedbackRecord], kind: str
) -> None:
    """Whatever the settings say of the teacher."""
    shared = Shared(target.embedding, target.files)
    made = begun(
        engine, target, tmp_path, first_version(kind, target.model, shared, torch.arange(200), Sizes(depths=2))
    )
    made.rescorer = Rescorer(lambda dtype: target, RescoreConfig(teacher="logged", rescore_share=1.0))
    made.update(served_records[:8])
    made.update(served_records[8:])
    (_, second, third) = made.registry.versions("demo")
    run = made.registry.training(third.version)
    assert run is not None
    assert (run.teacher, run.replayed) == ("rescored", 4)
    assert run.last_loss < run.first_loss
    assert second.evaluation is not None
    assert second.evaluation.requests == 2, "the gate had hidden states of the holdout"
    made.load = lambda dtype: target
    assert reproduce(made.lineage, made.drafter, 3).outcome == "identical"


def test_what_was_learnt_from_logged_rows_is_so_again_whatever_the_trainer_does_now(
    chain: Chain, target: Target
) -> None:
    run = chain.registry.training(chain.registry.version("demo", 3))
    assert run is not None
    assert run.teacher == "logged"
    chain.load = lambda dtype: target
    assert reproduce(chain.lineage, chain.drafter, 3).outcome == "identical"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_run_of_two_processes_comes_out_bit_for_bit(beginning: Chain, served_records: list[FeedbackRecord]) -> None:
    beginning.launch = launch(beginning.versions, beginning.store, DistributedConfig(trainer_processes=2))
    beginning.update(served_records[:8])
    run = beginning.registry.training(beginning.registry.version("demo", 2))
    assert run is not None
    assert (run.machine["processes"], run.machine["threads"]) == (2, 1)
    assert reproduce(beginning.lineage, beginning.drafter, 2).outcome == "identical"


def test_it_trains_with_as_many_threads_as_the_run_had(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    train = worker.reproduce.trained
    monkeypatch.setattr(
        worker.reproduce, "trained", lambda *a, **b: seen.append(torch.get_num_threads()) or train(*a, **b)
    )
    torch.set_num_threads(2)
    assert reproduce(chain.lineage, chain.drafter, 3).outcome == "identical"
    assert seen == [1]
    assert torch.get_num_threads() == 2


def test_nothing_is_written(chain: Chain) -> None:
    def state() -> object:
        return sorted(chain.store.digests()), chain.registry.versions("demo"), chain.registry.events("demo")

    before = state()
    reproduce(chain.lineage, chain.drafter, 3)
    assert state() == before


def test_changed_settings_in_the_row_are_said(chain: Chain) -> None:
    _change_run(chain, 3, "config", lambda config: {**config, "learning_rate": 1e-3})
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert found.outcome == "different"
    assert any("the settings in the training row are not those that the run had" in d for d in found.differences)
    assert any("tensors differ, by" in d for d in found.differences)


def test_another_torch_and_cpu_are_said(chain: Chain) -> None:
    _change_run(chain, 3, "machine", lambda machine: {**machine, "torch": "2.1.0", "capability": "SSE2"})
    _change_run(chain, 3, "config", lambda config: {**config, "seed": 1})
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert f"torch was 2.1.0, is {torch.__version__}" in found.differences
    assert any(d.startswith("capability was SSE2") for d in found.differences)


def test_settings_that_are_unknown_now_are_said(chain: Chain) -> None:
    _change_run(chain, 3, "config", lambda config: {**config, "dropout": 0.5})
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert (found.outcome, "dropout" in found.differences[0]) == ("impossible", True)


def test_a_damaged_parent_is_said(chain: Chain) -> None:
    path = chain.store.path(chain.registry.version("demo", 2).weights_sha256)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert found.outcome == "impossible"
    assert "does not match its sha256" in found.differences[0]


def test_a_damaged_file_of_the_version_itself_does_not_matter(chain: Chain) -> None:
    chain.store.path(chain.registry.version("demo", 3).weights_sha256).write_bytes(b"broken")
    assert reproduce(chain.lineage, chain.drafter, 3).outcome == "identical"


def test_a_damaged_window_is_said(chain: Chain) -> None:
    (window, _) = chain.windows.recent("demo", 2)
    chain.store.path(window.sha256).write_bytes(b"broken")
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert (found.outcome, "does not match its sha256" in found.differences[0]) == ("impossible", True)


def test_a_row_that_names_another_file_is_said(chain: Chain) -> None:
    with chain.database.begin() as connection:
        connection.execute(text("UPDATE feedback_window SET sha256 = :other WHERE id = 2"), {"other": "ab" * 32})
    found = reproduce(chain.lineage, chain.drafter, 3)
    assert found.differences == ("window 2 is not the one that the run read: its row names another file",)


def test_version_1_was_not_trained_on_traffic(chain: Chain) -> None:
    found = reproduce(chain.lineage, chain.drafter, 1)
    assert (found.outcome, "made by `redraft init`" in found.differences[0]) == ("impossible", True)


def test_after_a_purge_it_is_said_which_records_are_missing(chain: Chain) -> None:
    _purge(chain, "acme")
    found = reproduce(chain.lineage, chain.drafter, 2)
    assert found.outcome == "impossible"
    assert "2 of the records that it learnt from window 1 were purged" in found.differences[0]
    assert "tenant acme" in found.differences[0]


def test_a_purge_that_took_nothing_from_a_run_does_not_stand_in_its_way(chain: Chain) -> None:
    run = chain.registry.training(chain.registry.version("demo", 3))
    assert run is not None
    assert run.inputs is not None
    first = chain.windows.records(chain.windows.window(1))
    bystander = next(r for r in first.training if r.record_id not in run.inputs.replayed)
    _rename_tenant(chain, bystander.record_id, "elsewhere")
    _purge(chain, "elsewhere")
    assert chain.windows.window(1).sha256 != run.inputs.windows[0][1]
    assert reproduce(chain.lineage, chain.drafter, 3).outcome == "identical"
    assert reproduce(chain.lineage, chain.drafter, 2).outcome == "impossible"


def test_weights_deleted_for_their_age_can_be_made_again(chain: Chain) -> None:
    chain.update([msgspec.structs.replace(r, record_id=f"new-{r.record_id}") for r in _all_records(chain)])
    chain.registry.rollback("demo", 1, "test", "so that neither 2 nor 3 is in use")
    config = RetentionConfig(versions_kept=1, rollbacks_kept=0)
    assert retention.expire(chain.database, config) == 2
    garbage.collect(chain.database, chain.store, older_than_hours=-1)
    assert not chain.store.has(chain.registry.version("demo", 3).weights_sha256)
    blocked = reproduce(chain.lineage, chain.drafter, 3, restore="tester")
    assert "`redraft reproduce 2 --restore`" in blocked.differences[0]
    assert reproduce(chain.lineage, chain.drafter, 2, restore="tester").restored
    states = {s.version.number: s.weights_deleted for s in chain.registry.versions("demo")}
    assert states == {1: False, 2: False, 3: True, 4: False}
    chain.registry.rollback("demo", 2, "test", "it is whole again")
    assert reproduce(chain.lineage, chain.drafter, 3).outcome == "identical", (
        "the moments that it started from are back"
    )
    assert audit.verify(chain.database) is None


def _all_records(chain: Chain) -> list[FeedbackRecord]:
    return [r for w in chain.windows.recent("demo", 5) for r in chain.windows.records(w).training]


def _purge(chain: Chain, tenant: str) -> None:
    purge.finish(chain.database, chain.store, [], purge.begin(chain.database, tenant, False, "tester"))


def _rename_tenant(chain: Chain, record_id: str, tenant: str) -> None:
    """As if one record of window 1 had been another tenant's from the start, in its row and in the file."""
    window = chain.windows.window(1)
    records = chain.windows.records(window)
    training = tuple(
        msgspec.structs.replace(r, tenant=tenant) if r.record_id == record_id else r for r in records.training
    )
    digest = chain.store.put(packed(replace(records, training=training))).sha256
    chain.store.delete(window.sha256)
    with chain.database.begin() as connection:
        connection.execute(text("UPDATE feedback_window SET sha256 = :new WHERE id = 1"), {"new": digest})
        connection.execute(
            text("UPDATE window_record SET tenant = :tenant WHERE record_id = :id"), {"tenant": tenant, "id": record_id}
        )


def _change_run(chain: Chain, number: int, column: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Edit a JSON column of the version's training row."""
    version = chain.registry.version("demo", number)
    with transaction(chain.database) as session:
        row = session.scalars(select(TrainingRow).where(TrainingRow.version_id == version.id)).one()
        setattr(row, column, change(getattr(row, column)))
