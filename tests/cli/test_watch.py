"""`redraft watch`: both versions by workload with the test's interval and its verdict; and the quarantine by hand."""

import json

import pytest
from sqlalchemy import Engine

from storage.canary import Canaries
from storage.history import fold
from storage.registry import Registry, Version
from storage.watches import Watches
from storage.weights import WeightsStore
from tests.cli.conftest import Run
from tests.storage.rows import make_candidate, make_drafter, make_record, make_round


@pytest.fixture
def second(registry: Registry, store: WeightsStore) -> Version:
    """Version 2 replaced version 1 a moment ago, and 30 requests were served."""
    first = make_drafter(registry)
    made = make_candidate(registry, store, first, "a")
    registry.promote(made, first, "worker", "better", holdback=0.3)
    watch = Watches(registry.engine).open("chat")
    assert watch is not None
    at = watch.opened_at.timestamp() + 1
    fold(registry.engine, [make_record(f"r{n}", (make_round(2, 4, n % 5),), 9, finished_at=at) for n in range(30)])
    return made


def test_without_a_promotion_it_says_what_would_bring_one(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    assert "no promotion was watched yet" in redraft("watch").stdout


@pytest.mark.usefixtures("second")
def test_both_versions_are_shown_with_the_interval_and_the_verdict(redraft: Run) -> None:
    found = json.loads(redraft("watch", "--json").stdout)
    assert (found["version"], found["predecessor"], found["state"], found["verdict"]) == (2, 1, "open", "watching")
    assert (found["requests"], found["share"]) == (30, 0.3)
    rate = found["findings"][0]
    assert (rate["workload"], rate["policy"], rate["figure"]) == ("code", "greedy", "acceptance rate")
    assert rate["held"] + rate["others"] == 30
    assert rate["low"] <= 0 <= rate["high"]
    assert found["strayed"] == rate["held"]  # version 2 drafted for all


@pytest.mark.usefixtures("second")
def test_the_table_says_what_the_json_says(redraft: Run) -> None:
    text = redraft("watch", "--once").stdout
    assert text.startswith("version 2 of chat against version 1, promoted")
    assert "30% held back: watching" in text
    assert "accepted progress" in text
    assert text.rstrip().endswith("30 requests so far")


def test_a_watch_that_is_over_is_shown_with_its_reason_and_not_waited_for(
    redraft: Run, registry: Registry, second: Version
) -> None:
    registry.take_back(second, "watch", "worse than the predecessor: by 0.1")
    text = redraft("watch").stdout
    assert "held back: worse" in text
    assert "worse than the predecessor: by 0.1" in text


def test_a_canary_is_shown_as_one_and_a_rollback_recalls_it(
    redraft: Run, registry: Registry, store: WeightsStore
) -> None:
    first = make_drafter(registry)
    canary = make_candidate(registry, store, first, "a")
    Canaries(registry.engine).send_out(canary, first, 0.2, "worker", "the gate let it through")
    text = redraft("watch", "--once").stdout
    assert text.startswith("version 2 of chat against version 1, a canary with 20% of the requests since")
    assert json.loads(redraft("watch", "--json").stdout)["canary"]
    states = [row["state"] for row in json.loads(redraft("versions", "--json").stdout)]
    assert states == ["live", "canary"]
    done = redraft("rollback", "--reason", "not today", "--wait", "0").stdout
    assert done.startswith("version 1 of chat is live (generation 3)")
    assert [summary.state for summary in registry.versions("chat")] == ["live", "rolled_back"]


def test_a_promotion_by_hand_is_watched(
    redraft: Run, registry: Registry, store: WeightsStore, database: Engine
) -> None:
    make_candidate(registry, store, make_drafter(registry), "a")
    redraft("promote", "2", "--reason", "let us see", "--wait", "0")
    watch = Watches(database).open("chat")
    assert watch is not None
    assert (watch.version, watch.predecessor, watch.share) == (2, 1, 0.1)


def test_the_holdback_can_be_turned_off(
    redraft: Run, registry: Registry, store: WeightsStore, database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOLDBACK", "0")
    make_candidate(registry, store, make_drafter(registry), "a")
    redraft("promote", "2", "--reason", "let us see", "--wait", "0")
    assert Watches(database).open("chat") is None


def test_a_version_in_quarantine_needs_a_flag(redraft: Run, registry: Registry, second: Version) -> None:
    registry.take_back(second, "watch", "worse by 0.1")
    refused = redraft("promote", "2", "--reason", "I like it")
    assert refused.exit_code == 1
    assert "is in quarantine" in refused.stderr
    assert "--quarantined" in refused.stderr
    assert redraft("promote", "2", "--reason", "I like it", "--quarantined").exit_code == 0
    assert registry.live("chat").number == 2
