"""The worker's watch: it judges from SQL alone, takes back what is worse, and ends the holdback of what is not."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import Engine

from adapter.watch import WatchConfig, judge
from storage.history import fold
from storage.registry import Registry
from storage.shares import share_of
from storage.watches import Watches
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter, make_record, make_round
from worker.watching import Watcher

SHARE = 0.25
CONFIG = WatchConfig(watch_margin=0.2)


@pytest.fixture
def registry(engine: Engine, tmp_path: Path) -> Registry:
    """Version 2 was just promoted over version 1."""
    found = Registry(engine)
    first = make_drafter(found)
    second = make_candidate(found, WeightsStore(tmp_path / "weights"), first, "a")
    found.promote(second, first, "worker", "better", holdback=SHARE)
    return found


def serve(engine: Engine, requests: int, live: float, predecessor: float = 0.6, seed: int = 0) -> None:
    """Requests whose proposals are accepted with these probabilities, folded into the history."""
    watch = Watches(engine).open("chat")
    assert watch is not None
    generator, records = np.random.default_rng(seed), []
    for n in range(requests):
        held = share_of(f"request-{seed}-{n}") < SHARE
        accepted = generator.binomial(40, predecessor if held else live)
        rounds = (msgspec.structs.replace(make_round(1 if held else 2, 40, int(accepted)), draft_ms=30.0),)
        records.append(make_record(f"{seed}-{n}", rounds, 42, finished_at=watch.opened_at.timestamp() + 1))
    fold(engine, records)


def test_a_worse_version_is_rolled_back_with_its_figures_and_quarantined(engine: Engine, registry: Registry) -> None:
    serve(engine, 600, live=0.4)
    (verdict,) = Watcher(engine, CONFIG).look()
    assert verdict.state == "worse"
    assert registry.live("chat").number == 1
    event = registry.events("chat")[0]
    assert (event.kind, event.before, event.actor, event.reason) == ("rollback", 2, "watch", verdict.reason)
    assert "requests of the one and" in event.reason
    assert registry.versions("chat")[1].state == "quarantined"
    (closed,) = Watches(engine).recent("chat", 1)
    assert (closed.state, closed.requests) == ("worse", 600)
    assert closed.findings[0]["worse"]


def test_a_version_that_is_as_good_keeps_its_place_and_the_holdback_ends(engine: Engine, registry: Registry) -> None:
    serve(engine, 600, live=0.6)
    (verdict,) = Watcher(engine, CONFIG).look()
    assert verdict.state == "safe", verdict
    pointer = registry.pointer("chat")
    assert (pointer.live.number, pointer.generation, pointer.holdback) == (2, 2, 0.0)
    assert Watcher(engine, CONFIG).look() == []


def test_a_change_of_traffic_is_not_blamed_on_the_version(engine: Engine, registry: Registry) -> None:
    serve(engine, 150, live=0.7, predecessor=0.7)
    serve(engine, 150, live=0.2, predecessor=0.2, seed=1)
    (verdict,) = Watcher(engine, WatchConfig()).look()
    assert verdict.state == "watching"
    assert registry.live("chat").number == 2


def test_looking_again_after_a_restart_gives_the_same_answer(engine: Engine, registry: Registry) -> None:
    serve(engine, 60, live=0.6)
    first = Watcher(engine, CONFIG).look()
    assert Watcher(engine, CONFIG).look() == first
    assert first[0].state == "watching"
    found = Watches(engine).open("chat")
    assert found is not None
    assert (found.requests, found.reason) == (60, "60 requests so far")


def test_without_traffic_a_watch_waits(engine: Engine, registry: Registry) -> None:
    (verdict,) = Watcher(engine, CONFIG).look()
    assert verdict.state == "watching"


def test_an_operator_who_was_faster_is_not_overruled(engine: Engine, registry: Registry) -> None:
    serve(engine, 600, live=0.4)
    watcher = Watcher(engine, CONFIG)
    found = Watches(engine).open("chat")
    assert found is not None
    verdict = judge(Watches(engine).observations(found), SHARE, CONFIG)
    assert verdict.state == "worse"
    registry.rollback("chat", None, "cli:me", "by hand")
    watcher._take_back(found, verdict)
    assert registry.pointer("chat").generation == 3
    assert registry.versions("chat")[1].state == "rolled_back"


def test_the_watch_needs_no_torch() -> None:
    code = "import sys, worker.watching, worker.tasks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
