"""A version after its promotion, in the whole circle: a broken one is out within 20 rounds, a worse one is found."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine as Database

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from adapter.watch import WatchConfig
from service.engine.floor import FloorConfig
from storage import audit
from storage.registry import Quarantined, Version
from storage.watches import Watches
from storage.windows import Windows
from tests.circle import CONFIG, Circle, running_circle, tiny_prompts
from tests.service.engine.oracle import first_layers, plain_greedy, random_prompt
from tests.storage.rows import make_record, make_training
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until
from worker.watching import Watcher


@pytest.fixture
def circle(target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Circle]:
    """Version 1 is the target's first two layers of three, with the whole vocabulary."""
    config = replace(CONFIG, watch=WatchConfig())
    with running_circle(target, engine, valkey.url, tmp_path, first_layers(target, layers=2), config) as circle:
        yield circle


def add(circle: Circle, drafter: CausalLM, name: str) -> Version:
    """A version of these weights, as a trainer would have left it."""
    windows, parent = Windows(circle.database, circle.blobs), circle.registry.live("demo")
    window = windows.keep("demo", (make_record(name, drafter="demo"),), ())
    assert window is not None
    windows.close(window, "promoted")
    blob = circle.versions.save(drafter)
    return circle.registry.add_candidate(parent, blob.sha256, blob.size, window.id, make_training())


def shuffled(target: Target) -> CausalLM:
    """The drafter with a head that names other tokens than it means."""
    broken = first_layers(target, layers=2)
    with torch.no_grad():
        order = torch.randperm(len(broken.head.weight), generator=torch.Generator().manual_seed(0))
        broken.head.weight.copy_(broken.head.weight[order].clone())
    return broken


def shaken(target: Target) -> CausalLM:
    """The drafter with noise on its weights."""
    worse, generator = first_layers(target, layers=2), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in worse.trainable():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return worse


@pytest.mark.parametrize("holdback", [0.1, 0.0])
def test_a_broken_version_promoted_by_hand_is_taken_back_within_20_rounds(
    circle: Circle, target: Target, holdback: float
) -> None:
    prompts = tiny_prompts(target, 24)
    before = circle.send(prompts)
    broken = add(circle, shuffled(target), "broken")
    circle.registry.promote(broken, circle.registry.live("demo"), "cli:me", "what could go wrong", holdback)
    until(lambda: circle.engine.lanes.version() == 2)

    after = [client for prompt in prompts for client in circle.send([prompt])]  # one after the other
    rounds = [r for client in after for r in client.usage.rounds if r.version == 2]
    assert 0 < len(rounds) <= 20
    assert [c.tokens for c in after] == [c.tokens for c in before]
    assert after[0].tokens == plain_greedy(target, prompts[0], 24)

    until(lambda: circle.registry.live("demo").number == 1)
    until(lambda: circle.engine.lanes.version() == 1)
    summary = circle.registry.versions("demo")[1]
    assert summary.state == "quarantined"
    assert "below the floor right after the swap: acceptance length 1.0" in summary.reason
    event = circle.registry.events("demo")[0]
    assert (event.kind, event.actor, event.reason) == ("rollback", "server:server-1", summary.reason)
    assert audit.verify(circle.database) is None
    with pytest.raises(Quarantined):
        circle.registry.promote(broken, circle.registry.live("demo"), "worker", "again", holdback)


def test_a_worse_version_is_found_by_comparison_without_the_floor(
    target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Version 2's weights are shaken a little: of what it proposes, a third as much is accepted."""
    first = first_layers(target, layers=2)
    with running_circle(target, engine, valkey.url, tmp_path, first, floor=FloorConfig(floor_rounds=0)) as circle:
        circle.send(tiny_prompts(target, 16))
        version = add(circle, shaken(target), "worse")
        circle.registry.promote(version, circle.registry.live("demo"), "cli:me", "it looked better", 0.3)
        until(lambda: circle.engine.lanes.version() == 2)
        watcher = Watcher(circle.database, WatchConfig(watch_margin=0.02))
        for _ in range(12):
            clients = circle.send([random_prompt(target, n, 6) for n in range(64)], max_tokens=24)
            assert clients[0].tokens == plain_greedy(target, clients[0].generation.prompt_ids, 24)
            circle.housekeeper.fold_history()
            if any(verdict.state == "worse" for verdict in watcher.look()):
                break
        (watch,) = Watches(circle.database).recent("demo", 1)
        assert watch.state == "worse", watch.reason
        assert watch.reason.startswith("worse than the predecessor: acce"), watch.reason
        until(lambda: circle.engine.lanes.version() == 1)
        assert circle.registry.versions("demo")[1].state == "quarantined"


def test_a_version_that_is_as_good_keeps_its_place_and_then_serves_all(circle: Circle, target: Target) -> None:
    circle.send(tiny_prompts(target, 16))
    same = add(circle, first_layers(target, layers=2), "same")
    circle.registry.promote(same, circle.registry.live("demo"), "cli:me", "as good", 0.3)
    until(lambda: circle.engine.lanes.version() == 2)
    versions = {r.version for client in circle.send(tiny_prompts(target, 32)) for r in client.usage.rounds}
    assert versions == {1, 2}
    found = Watches(circle.database).open("demo")
    assert found is not None
    Watches(circle.database).close(found, "safe", "no fall")
    until(lambda: len(circle.engine._residents.all()) == 1)
    versions = {r.version for client in circle.send(tiny_prompts(target, 32)) for r in client.usage.rounds}
    assert versions == {2}
