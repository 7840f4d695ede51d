"""A canary in the whole circle: a good one is promoted, a broken one is taken back, and the others never saw it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine as Database

from adapter.target import Target
from adapter.watch import WatchConfig
from storage import audit
from storage.canary import Canaries
from storage.jobs import Jobs
from storage.shares import share_of
from storage.watches import Watches
from storage.windows import Windows
from tests.circle import CONFIG, Circle, running_circle, tiny_first, tiny_prompts
from tests.service.engine.oracle import Client, first_layers, plain_greedy
from tests.test_watch import add, shuffled
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until
from worker.watching import Watcher

SHARE = 0.3
WATCH = WatchConfig(holdback=0.2, canary=SHARE, watch_margin=0.3)


@pytest.fixture
def circle(target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Circle]:
    """Version 1 is the target's first two layers of three, with the whole vocabulary."""
    config = replace(CONFIG, watch=WATCH)
    with running_circle(target, engine, valkey.url, tmp_path, first_layers(target, layers=2), config) as circle:
        yield circle


def drafted(clients: list[Client]) -> dict[bool, set[int]]:
    """The versions that drafted, for the canary's requests (True) and for the others."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for client in clients:
        found[share_of(client.generation.request_id) >= 1 - SHARE] |= {r.version for r in client.usage.rounds}
    return found


def test_a_good_canary_serves_its_share_and_is_promoted(circle: Circle, target: Target) -> None:
    before = circle.send(tiny_prompts(target, 16))
    good, live = add(circle, first_layers(target, layers=2), "good"), circle.registry.live("demo")
    Canaries(circle.database).send_out(good, live, SHARE, "worker", "the gate let it through")
    until(lambda: len(circle.engine._residents.all()) == 2)
    clients = circle.send(tiny_prompts(target, 96))
    assert drafted(clients) == {True: {2}, False: {1}}
    assert [c.tokens for c in clients[:16]] == [c.tokens for c in before]
    assert circle.engine.lanes.version() == 1

    watcher = Watcher(circle.database, WATCH)
    for _ in range(8):
        circle.housekeeper.fold_history()
        (verdict,) = watcher.look()
        if verdict.state != "watching":
            break
        circle.send(tiny_prompts(target, 96))
    assert (verdict.state, verdict.promote) == ("safe", True), verdict.reason
    until(lambda: circle.engine.lanes.version() == 2)
    pointer = circle.registry.pointer("demo")
    assert (pointer.live.number, pointer.canary, pointer.holdback) == (2, None, 0.2)
    assert [event.kind for event in circle.registry.events("demo")] == ["promote", "canary", "init"]
    assert {r.version for c in circle.send(tiny_prompts(target, 32)) for r in c.usage.rounds} == {1, 2}
    assert audit.verify(circle.database) is None


def test_a_broken_canary_is_taken_back_and_the_others_never_saw_it(circle: Circle, target: Target) -> None:
    circle.send(tiny_prompts(target, 24))
    broken, live = add(circle, shuffled(target), "broken"), circle.registry.live("demo")
    Canaries(circle.database).send_out(broken, live, SHARE, "worker", "the gate let it through")
    until(lambda: len(circle.engine._residents.all()) == 2)
    prompts = tiny_prompts(target, 48)
    clients = [client for prompt in prompts for client in circle.send([prompt])]  # one after the other
    rounds = [r for client in clients for r in client.usage.rounds if r.version == 2]
    assert 0 < len(rounds) <= 20
    assert 2 not in drafted(clients)[False]
    assert clients[0].tokens == plain_greedy(target, prompts[0], 24)

    until(lambda: circle.registry.pointer("demo").canary is None)
    summary = circle.registry.versions("demo")[1]
    assert summary.state == "quarantined"
    assert "below the floor right after the swap: acceptance length 1.0" in summary.reason
    event = circle.registry.events("demo")[0]
    assert (event.kind, event.before, event.actor) == ("recall", 2, "server:server-1")
    assert Watches(circle.database).recent("demo", 1)[0].state == "worse"
    assert (circle.registry.live("demo").number, circle.engine.lanes.version()) == (1, 1)
    assert drafted(circle.send(prompts)) == {True: {1}, False: {1}}


def test_an_update_sends_its_candidate_out_and_the_next_one_waits(
    target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path
) -> None:
    config = replace(CONFIG, watch=WATCH)
    with running_circle(target, engine, valkey.url, tmp_path, tiny_first(target), config) as circle:
        circle.send(tiny_prompts(target, 48))
        (job,) = circle.housekeeper.sweep()
        stores = circle.stores(job)
        decision = circle.adapt(stores)
        assert decision is not None
        assert decision.promote, decision.reason
        pointer = circle.registry.pointer("demo")
        assert (pointer.live.number, pointer.canary.number if pointer.canary else 0) == (1, 2)
        Jobs(engine).finish(stores.lease, "done")

        until(lambda: len(circle.engine._residents.all()) == 2)
        assert drafted(circle.send(tiny_prompts(target, 48))) == {True: {2}, False: {1}}
        assert circle.housekeeper.sweep() == []
        circle.registry.rollback("demo", None, "cli:me", "enough")
        assert len(circle.housekeeper.sweep()) == 1


def test_a_trainer_killed_after_sending_out_does_not_send_out_again(
    target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, watch=WATCH)
    with running_circle(target, engine, valkey.url, tmp_path, tiny_first(target), config) as circle:
        circle.send(tiny_prompts(target, 48))
        (job,) = circle.housekeeper.sweep()
        stores = circle.stores(job)
        with monkeypatch.context() as killed:
            killed.setattr(Windows, "close", _killed)
            with pytest.raises(KeyboardInterrupt):
                circle.adapt(stores)
        assert circle.registry.pointer("demo").generation == 2
        circle.registry.rollback("demo", None, "cli:me", "enough")
        decision = circle.adapt(stores)
        assert decision is not None
        assert decision.reason == "not promoted: version 2 was rolled back meanwhile"
        assert circle.registry.pointer("demo").generation == 3


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
