"""The grid of losses and positions on a tiny target."""

import json

import pytest

from adapter.distil import DistilConfig
from adapter.target import Target
from benchmarks.experiment import Traffic
from benchmarks.grid import Cell, GridReport, GridSettings, measure, winners
from tests.benchmarks.test_adapt import prepared

TRAFFIC = Traffic(requests=8, held_out=4, max_tokens=12, seed=0)
SETTINGS = GridSettings(TRAFFIC, ("forward_kl", "jsd"), ("rejected", "verified"), draft_length=2, warm_start=False)


@pytest.fixture(scope="module")
def report(target: Target, tmp_path_factory: pytest.TempPathFactory) -> GridReport:
    folder = tmp_path_factory.mktemp("grid")
    experiment = prepared(target, folder / "cache", folder / "run", TRAFFIC)
    return measure(experiment, SETTINGS, DistilConfig(epochs=4, learning_rate=5e-3))


def test_every_loss_meets_every_choice_of_positions_on_every_workload(report: GridReport) -> None:
    ways = {(row.loss, row.positions, row.workload) for row in report.rows}
    assert len(ways) == len(report.rows) == 2 * 2 * 2
    for workload in ("sql", "code"):
        assert len({row.before for row in report.rows if row.workload == workload}) == 1
    for row in report.rows:
        assert row.gain == pytest.approx(row.probability - row.before)
        assert row.gain_low <= row.gain <= row.gain_high
        assert row.training_seconds > 0


def test_the_file_names_the_winners(report: GridReport) -> None:
    written = json.loads(json.dumps(report.as_json()))
    assert written["winners"].keys() == {"sql", "code", "all"}
    best = max((row for row in report.rows if row.workload == "sql"), key=lambda row: row.probability)
    assert report.winners["sql"] == f"{best.loss}/{best.positions}"


def test_the_winner_over_all_is_best_on_the_mean() -> None:
    def cell(loss: str, workload: str, probability: float) -> Cell:
        return Cell(loss, "verified", workload, 4, 0.5, probability, 0.0, 0.0, 0.0, 1.0, 1.0)

    rows = [cell("jsd", "a", 0.9), cell("jsd", "b", 0.1), cell("forward_kl", "a", 0.8), cell("forward_kl", "b", 0.7)]
    assert winners(rows) == {"a": "jsd/verified", "b": "forward_kl/verified", "all": "forward_kl/verified"}
