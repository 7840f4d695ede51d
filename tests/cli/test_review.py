"""Reviewing versions: the list, a version's card, two side by side, and the history."""

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save
from sqlalchemy import Engine

from storage import history
from storage.registry import Registry, Version
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.cli.conftest import Run
from tests.storage.rows import (
    MINUTE,
    make_candidate,
    make_decision,
    make_drafter,
    make_evaluation,
    make_record,
    make_round,
    make_training,
)


@pytest.fixture
def promoted(registry: Registry, store: WeightsStore) -> Version:
    """Version 2, live after the gate said yes, made from version 1."""
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    registry.record(second, make_evaluation(0.1), make_decision(True, "promoted: gain 0.1, 12 requests"))
    registry.promote(second, first, "worker", "promoted: gain 0.1, 12 requests")
    return second


@pytest.fixture
def traffic(promoted: Version, database: Engine) -> None:
    """Two requests of version 1, then one of version 2 a minute later."""
    history.fold(
        database,
        [
            make_record("r1", (make_round(1, 4, 0), make_round(1, 4, 1)), finished_at=MINUTE),
            make_record("r2", (make_round(1, 4, 1),), finished_at=MINUTE),
            make_record("r3", (make_round(2, 4, 3), make_round(2, 4, 2)), finished_at=MINUTE + 60),
        ],
    )


def test_the_list_begins_with_what_is_live_and_what_a_rollback_gives(
    redraft: Run, promoted: Version, registry: Registry, store: WeightsStore
) -> None:
    for name in ("b", "c"):
        make_candidate(registry, store, promoted, name)
    rows = json.loads(redraft("versions", "--json").stdout)
    assert [row["number"] for row in rows] == [2, 1, 4, 3]
    assert [row["state"] for row in rows] == ["live", "retired", "candidate", "candidate"]
    assert [row["previous"] for row in rows] == [False, True, False, False]


@pytest.mark.usefixtures("traffic")
def test_the_list_has_each_versions_live_figures_with_their_k(redraft: Run) -> None:
    second, first = json.loads(redraft("versions", "--json").stdout)
    assert (first["requests"], first["k"], first["acceptance_rate"]) == (2, 4, pytest.approx(2 / 12))
    assert first["acceptance_length"] == pytest.approx(1 + 2 / 3)
    assert (second["requests"], second["acceptance_rate"]) == (1, pytest.approx(5 / 8))
    assert second["acceptance_probability"] == pytest.approx(0.3)


@pytest.mark.usefixtures("traffic")
def test_lossy_traffic_is_named_and_in_no_figure_of_a_version(redraft: Run, database: Engine) -> None:
    before = json.loads(redraft("versions", "--json").stdout)
    assert "lossily" not in redraft("versions").stdout
    lossy = msgspec.structs.replace(make_record("r4", (make_round(2, 4, 4),)), lossless=False, temperature=0.8)
    history.fold(database, [lossy])
    after = json.loads(redraft("versions", "--json").stdout)
    assert [row.pop("lossy_requests") for row in after] == [1, 0]
    assert after == [{name: value for name, value in row.items() if name != "lossy_requests"} for row in before]
    assert "verified lossily (1 of version 2)" in redraft("versions").stdout
    rows = json.loads(redraft("history", "--json").stdout)["rows"]
    assert {(row["policy"], row["lossless"]) for row in rows} == {("greedy", True), ("t0.8 lossy", False)}
    for command in (("history",), ("show", "2"), ("compare", "1", "2")):
        assert "t0.8 lossy" in redraft(*command).stdout


@pytest.mark.usefixtures("traffic")
def test_the_table_says_what_the_json_says(redraft: Run) -> None:
    lines = redraft("versions").stdout.splitlines()
    second, first = (" ".join(line.split()) for line in lines[2:4])
    assert second.startswith("2 live 1 0.300 1 4 0.625 3.50")
    assert second.endswith("promoted: gain 0.1, 12 requests")
    assert first.startswith("1 retired, previous - - 2 4 0.167 1.67")
    assert first.endswith("replaced by version 2")


@pytest.mark.usefixtures("traffic")
def test_the_card_has_lineage_evaluation_life_and_traffic(redraft: Run, promoted: Version) -> None:
    card = json.loads(redraft("show", "2", "--json").stdout)
    assert (card["number"], card["parent"], card["state"]) == (2, 1, "live")
    assert card["window_id"] == promoted.window_id
    assert card["training"]["config"] == {"lr": 0.001}
    assert card["evaluation"]["overall"]["gain"] == pytest.approx(0.1)
    assert [i["ended_at"] for i in card["intervals"]] == [None]
    assert [(e["kind"], e["before"], e["after"], e["actor"]) for e in card["events"]] == [("promote", 1, 2, "worker")]
    assert [(a["workload"], a["policy"], a["requests"]) for a in card["acceptance"]] == [("code", "greedy", 1)]


@pytest.mark.usefixtures("traffic")
def test_the_card_for_people_has_the_gates_sentence_and_interval(redraft: Run) -> None:
    text = redraft("show", "2").stdout
    assert "promoted: gain 0.1, 12 requests" in text
    assert "0.200 -> 0.300" in text
    assert "+0.100 [+0.050, +0.150]" in text


@pytest.mark.usefixtures("traffic")
def test_the_card_for_people_says_what_training_did_and_what_the_draft_vocabulary_covers(redraft: Run) -> None:
    text = " ".join(redraft("show", "2").stdout.split())
    assert "3 records (2 replayed), 40 positions, 2 passes, 5 steps" in text
    assert "covers 87.5% of the target's mass, 75.0% of the emitted tokens" in text
    assert "2.500 -> 1.250 -> 1.500" in text
    assert "novelty 1.50" in text
    assert "teacher the target, which scored the records again" in text


def test_a_first_version_has_no_training_and_no_evaluation(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    card = json.loads(redraft("show", "1", "--json").stdout)
    assert (card["training"], card["evaluation"], card["parent"]) == (None, None, None)
    assert redraft("show", "1").exit_code == 0


@pytest.mark.usefixtures("traffic")
def test_a_comparison_puts_each_workload_side_by_side(redraft: Run) -> None:
    text = redraft("compare", "1", "2").stdout
    lengths = next(line for line in text.splitlines() if "code, greedy: acceptance length" in line)
    assert lengths.split()[-4:] == ["1.67", "(k=4)", "3.50", "(k=4)"]


def test_a_comparison_tells_how_far_the_weights_moved(redraft: Run, registry: Registry, store: WeightsStore) -> None:
    before = {"a": np.array([3.0, 0.0], np.float32), "b": np.array([4.0], np.float32)}
    after = {"a": np.array([3.0, 3.0], np.float32), "b": np.array([8.0], np.float32)}
    blobs = [store.put(save(tensors)) for tensors in (before, after)]
    first = registry.create_drafter("chat", "causal_lm", "t", "k", {}, blobs[0].sha256, blobs[0].size, "test")
    window = Windows(registry.engine, store).keep("chat", (make_record("w"),), ())
    assert window is not None
    registry.add_candidate(first, blobs[1].sha256, blobs[1].size, window.id, make_training())
    compared = json.loads(redraft("compare", "1", "2", "--json").stdout)
    moved = {change["tensor"]: change["relative"] for change in compared["weights"]}
    assert moved == {"": pytest.approx(1.0), "a": pytest.approx(1.0), "b": pytest.approx(1.0)}


@pytest.mark.usefixtures("traffic")
def test_the_history_has_a_row_a_minute_and_the_moves(redraft: Run) -> None:
    found = json.loads(redraft("history", "--json").stdout)
    assert [(row["version"], row["requests"]) for row in found["rows"]] == [(1, 2), (2, 1)]
    assert found["rows"][1]["acceptance_length"] == pytest.approx(3.5)
    assert [event["kind"] for event in found["events"]] == ["promote", "init"]
    assert [interval["version"] for interval in found["intervals"]] == [1, 2]


@pytest.mark.usefixtures("traffic")
def test_the_history_can_be_narrowed_to_a_workload(redraft: Run) -> None:
    assert json.loads(redraft("history", "--workload", "sql", "--json").stdout)["rows"] == []
    assert len(json.loads(redraft("history", "--workload", "code", "--json").stdout)["rows"]) == 2


def test_without_traffic_the_history_says_what_brings_it(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    assert "no traffic" in redraft("history").stdout


def test_another_drafter_is_reached_by_name(redraft: Run, registry: Registry) -> None:
    make_drafter(registry, "chat")
    make_drafter(registry, "code")
    refused = redraft("versions")
    assert refused.exit_code == 1
    assert "REDRAFT_DRAFTER" in refused.stderr
    assert redraft("versions", "--drafter", "code").stdout.startswith("versions of code")


def test_numbers_that_are_none_are_null_in_json(
    redraft: Run, promoted: Version, registry: Registry, store: WeightsStore
) -> None:
    third = make_candidate(registry, store, promoted, "nan")
    registry.record(third, make_evaluation(float("nan")), make_decision(False))
    card = json.loads(redraft("show", "3", "--json").stdout)
    assert card["evaluation"]["overall"]["gain"] is None
