"""`redraft drift`: alarms with their cause and what became of them, series, and what was kept out of training."""

import json

import pytest
from sqlalchemy import Engine

from storage import left_out
from storage.drift import FALL, NOVEL, DriftStore, Finding, Revision, Series
from storage.registry import Registry
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.cli.conftest import Run
from tests.storage.rows import DIGEST, make_drafter, make_record, make_training

FELL = Finding(FALL, "code", "greedy", 1, 0.71, 0.4, 9, "acceptance probability of workload code (greedy) fell")
CAME = Finding(NOVEL, "sql", "greedy", 1, None, None, 1, "workload sql is new (greedy)")
STATE = {"count": 25.0, "mean": 0.625, "evidence": 3.25}


@pytest.fixture
def drifted(registry: Registry, database: Engine) -> DriftStore:
    make_drafter(registry)
    store = DriftStore(database)
    store.revise("chat", lambda known: Revision({("code", "greedy"): Series(1, 40, STATE)}, (CAME, FELL)))
    left_out.count(database, "chat", {"repeated": 7}, {"repeated": "an identical prompt and output"})
    return store


def test_alarms_come_newest_first_with_before_and_after(redraft: Run, drifted: DriftStore) -> None:
    found = json.loads(redraft("drift", "--json").stdout)
    assert [(a["kind"], a["before"], a["after"], a["window_id"]) for a in found["alarms"]] == [
        ("fall", 0.71, 0.4, None),
        ("novel", None, None, None),
    ]
    assert found["pending"] is True
    assert found["counts"] == {"fall": 1, "novel": 1}
    assert found["series"][0]["acceptance_probability"] == 0.625
    assert (found["series"][0]["requests"], found["series"][0]["evidence"]) == (40, 3.25)
    assert [(f["guard"], f["records"]) for f in found["left_out"]] == [("repeated", 7)]


def test_the_table_says_what_the_json_says(redraft: Run, drifted: DriftStore) -> None:
    lines = [" ".join(line.split()) for line in redraft("drift").stdout.splitlines()]
    assert any(
        "fall code greedy 1 0.710 0.400 9 awaited acceptance probability of workload code" in line for line in lines
    )
    assert any("novel sql greedy 1 - - 1 - workload sql is new (greedy)" in line for line in lines)
    assert any(line.startswith("code greedy 1 0.625 40 3.2") for line in lines)
    assert any(line.startswith("repeated 7 ") for line in lines)


def test_without_drift_it_says_so(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    assert "no alarms" in redraft("drift").stdout


def test_a_version_shows_the_alarm_that_its_window_answers_and_what_was_left_out(
    redraft: Run, drifted: DriftStore, registry: Registry, store: WeightsStore
) -> None:
    window = Windows(registry.engine, store).keep(
        "chat", (make_record("a"),), (), cause="drift", left_out={"not_learnable": 2}
    )
    assert window is not None
    registry.add_candidate(registry.live("chat"), DIGEST, 100, window.id, make_training())
    text = redraft("show", "2").stdout
    assert "1, started by drift: 1 training, 0 holdout; left out: 2 not learnable" in text
    assert FELL.reason in text
    shown = json.loads(redraft("show", "2", "--json").stdout)["window"]
    assert (shown["cause"], shown["left_out"], shown["training"]) == ("drift", {"not_learnable": 2}, 1)
    assert [a["reason"] for a in shown["alarms"]] == [FELL.reason]
    assert "window 1" in redraft("drift").stdout
