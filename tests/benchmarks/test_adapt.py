"""The sharp-drift experiment on a tiny target: every arm, every figure, and a second run without the target."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adapter.distil import DistilConfig
from adapter.drafters.causal_lm import CausalLM
from adapter.drift import DriftConfig
from adapter.gate import GateConfig
from adapter.target import Target
from benchmarks import learning
from benchmarks.adapt import AdaptReport, AdaptSettings, Ours, measure
from benchmarks.curve import MEANINGS, Row
from benchmarks.curve_plot import draw
from benchmarks.experiment import Experiment, Start, Traffic, prepare
from benchmarks.workload import NoPrompts
from tests.valkey_fixture import ValkeyServer
from worker.config import TriggerConfig
from worker.pipeline import AdaptConfig

WORKLOADS = {
    "sql": [f"select name from city where number = {i}" for i in range(40)],
    "code": [f"def add_{i}(first, second): return first + {i}" for i in range(40)],
}
TRAFFIC = Traffic(requests=24, held_out=6, max_tokens=16, seed=0)
ARMS = ("frozen", "osd", "redraft", "offline", "total_variation/rejected")
SETTINGS = AdaptSettings(TRAFFIC, ARMS, draft_length=3, window=6, warm_start=False)
OURS = Ours(
    AdaptConfig(
        TriggerConfig(window_records=8, window_minimum=4, holdout_share=0.3),
        DistilConfig(epochs=6, learning_rate=5e-3, batch_tokens=256),
        GateConfig(margin=-0.5, tolerance=1.0, minimum_requests=1),
    ),
    DriftConfig(),
)


def first_of(target: Target) -> Start:
    return Start(lambda: CausalLM.from_target(target.model, 1, torch.arange(250)), "one layer")


def prepared(target: Target, cache: Path, folder: Path, traffic: Traffic = TRAFFIC) -> Experiment:
    return prepare(target, target.embedding, WORKLOADS, traffic, first_of(target), cache, folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def report(
    target: Target, cache: Path, shared_valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> AdaptReport:
    with shared_valkey.client() as client:
        client.flushall()
    folder = tmp_path_factory.mktemp("run")
    return measure(prepared(target, cache, folder), SETTINGS, OURS, shared_valkey.url)


def rows(report: AdaptReport, arm: str) -> list[Row]:
    return [row for row in report.rows if row.arm == arm]


def test_every_arm_has_a_row_for_every_workload_in_the_order_of_the_shifts(report: AdaptReport) -> None:
    assert [(row.arm, row.workload) for row in report.rows] == [(arm, w) for arm in ARMS for w in WORKLOADS]


def test_each_curve_has_a_point_a_request(report: AdaptReport) -> None:
    for row in report.rows:
        assert len(row.curve) == len(row.length_curve) == len(row.probabilities) == row.requests == 24
        assert all(0 <= point <= 1 for point in row.curve)
        assert all(1 <= length <= 4 for length in row.length_curve)


def test_the_frozen_arm_never_changes(report: AdaptReport) -> None:
    for row in rows(report, "frozen"):
        assert (row.updates, row.promotions, row.training_seconds, row.forgotten) == (0, 0, 0.0, 0.0)
    assert "frozen" not in {noted.arm for noted in report.updates}


def test_all_arms_meet_the_first_requests_alike_as_nothing_was_learnt_yet(report: AdaptReport) -> None:
    first = {row.probabilities[:8] for row in report.rows if row.workload == "sql" and row.arm != "offline"}
    assert len(first) == 1


def test_osd_takes_every_step_that_it_makes(report: AdaptReport) -> None:
    osd = [noted.update for noted in report.updates if noted.arm == "osd"]
    assert [update.records for update in osd] == [8] * 6
    assert {update.outcome for update in osd} <= {"promoted", "failed"}  # failed: nothing was refused
    assert sum(row.promotions for row in rows(report, "osd")) == sum(u.outcome == "promoted" for u in osd) > 0


def test_redraft_learns_through_the_gate_and_gets_better(report: AdaptReport) -> None:
    updates = [noted.update for noted in report.updates if noted.arm == "redraft"]
    assert updates
    assert {update.outcome for update in updates} <= {"promoted", "refused"}
    assert all(update.records < 8 for update in updates), "the gate's holdout is not trained on"
    ours, theirs = (sum(row.end for row in rows(report, arm)) for arm in ("redraft", "frozen"))
    assert ours > theirs
    assert sum(row.training_seconds for row in rows(report, "redraft")) > 0


def test_the_ceiling_is_one_for_all_arms_and_above_the_frozen_drafter(report: AdaptReport) -> None:
    for workload in WORKLOADS:
        (ceiling,) = {row.ceiling for row in report.rows if row.workload == workload}
        (frozen,) = (row for row in rows(report, "frozen") if row.workload == workload)
        assert ceiling is not None
        assert ceiling > frozen.held_out_after


def test_the_last_workload_is_not_forgotten_and_earlier_ones_are_asked_again(report: AdaptReport) -> None:
    for arm in ARMS:
        earlier, last = rows(report, arm)
        assert last.forgotten == 0.0
        assert earlier.forgotten == pytest.approx(earlier.held_out_after - earlier.held_out_at_end)


def test_the_file_has_settings_machine_rows_and_what_they_mean(report: AdaptReport) -> None:
    written = json.loads(json.dumps(report.as_json()))
    assert {"settings", "machine", "rows", "updates", "learning", "meanings"} == written.keys()
    assert written["learning"]["osd"]["distil"]["positions"] == "rejected"
    assert written["learning"]["total_variation/rejected"]["distil"]["loss"] == "total_variation"
    assert set(written["meanings"]) | {"workload", "requests", "k"} == set(written["rows"][0])
    assert MEANINGS["ceiling"]


def test_the_picture_is_drawn(report: AdaptReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.png"
    draw(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("report")
def test_a_second_run_asks_the_target_nothing_and_is_the_same(
    target: Target, cache: Path, report: AdaptReport, valkey: ValkeyServer, tmp_path: Path
) -> None:
    silent = replace(target, model=SimpleNamespace(get_input_embeddings=target.model.get_input_embeddings))
    settings = replace(SETTINGS, arms=("frozen", "redraft"))
    experiment = prepared(silent, cache, tmp_path)
    again = measure(experiment, settings, OURS, valkey.url)
    assert [row.curve for row in again.rows] == [row.curve for row in report.rows if row.arm in ("frozen", "redraft")]
    assert {row.ceiling for row in again.rows} == {row.requests_to_90 for row in again.rows} == {None}


def test_another_length_of_answers_is_another_file(target: Target, tmp_path: Path) -> None:
    short = Traffic(requests=4, held_out=1, max_tokens=3, seed=None)
    for traffic in (short, replace(short, max_tokens=4), short):
        experiment = prepared(target, tmp_path / "cache", tmp_path / "run", traffic)
        lengths = [len(r.output) for part in experiment.segments for r in part.stream]
        assert max(lengths) == traffic.max_tokens
    assert len(list((tmp_path / "cache").glob("answers-*"))) == 4
    assert len(list((tmp_path / "cache").glob("first-*"))) == 1


def test_held_out_requests_are_no_traffic(target: Target, cache: Path, tmp_path: Path) -> None:
    for part in prepared(target, cache, tmp_path).segments:
        assert (len(part.stream), len(part.held_out)) == (24, 6)
        assert not {r.prompt_ids for r in part.stream} & {r.prompt_ids for r in part.held_out}
        assert {r.workload for r in (*part.stream, *part.held_out)} == {part.workload}


def test_more_requests_than_there_are_prompts_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(NoPrompts, match="workload sql has 40 prompts"):
        prepared(target, tmp_path, tmp_path, replace(TRAFFIC, requests=40))


def test_an_arm_that_is_none_is_named() -> None:
    with pytest.raises(learning.UnknownArm, match="'fast' is no arm: use frozen, osd"):
        learning.check(("frozen", "fast"))
    learning.check((*learning.NAMED, "jsd/verified"))
