"""The whole circle on a tiny model: requests become feedback, feedback a window, a window a version, and back.

Read it from top to bottom as the documentation of the flow. Everything is real but the size of the model:
the engine, Valkey, the database (SQLite and PostgreSQL), the weights store, distillation and the gate.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine as Database
from sqlalchemy import text

from adapter.target import Target
from storage import history
from storage.jobs import Jobs, LeaseLost
from storage.registry import Registry
from storage.servers import Servers
from tests.circle import Circle, running_circle, tiny_first, tiny_prompts
from tests.service.engine.oracle import ask, plain_greedy, random_prompt
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until
from worker import pipeline


@pytest.fixture
def circle(target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Circle]:
    with running_circle(target, engine, valkey.url, tmp_path, tiny_first(target)) as circle:
        yield circle


def test_a_drafter_learns_from_its_traffic_goes_live_and_is_taken_back(circle: Circle, engine: Database) -> None:
    # 1. Version 1 proposes, the target verifies; each finished request leaves a record on the stream.
    first = circle.send(tiny_prompts(circle.target, 48))
    assert {r.version for client in first for r in client.usage.rounds} == {1}

    # 2. Enough feedback waits, so the housekeeper's sweep makes a job and rings for it. Once is enough.
    (job,) = circle.housekeeper.sweep()
    assert circle.housekeeper.sweep() == [job]

    # 3. The trainer takes the lease: collect, distil, evaluate, decide, promote.
    stores = circle.stores(job)
    decision = circle.adapt(stores)
    assert decision is not None
    assert decision.promote, decision.reason
    Jobs(engine).finish(stores.lease, "done")

    # 4. The pointer has moved in SQL; the server follows, swaps between rounds and acknowledges.
    until(lambda: circle.engine.lanes.version() == 2)
    until(lambda: [s.generation for s in Servers(engine).live("demo")] == [2])

    # 5. The same prompts again: the text is the target's as before, and more of it was proposed.
    second = circle.send(tiny_prompts(circle.target, 48))
    assert [c.tokens for c in first] == [c.tokens for c in second]
    assert first[0].tokens == plain_greedy(circle.target, random_prompt(circle.target, 0, 6), 24)

    # 6. The acceptance history has each record once, by version.
    assert circle.housekeeper.fold_history() == 96
    assert circle.housekeeper.fold_history() == 0
    before, after = history.by_version(engine, "demo")
    assert (before.version, before.requests, after.version, after.requests) == (1, 48, 2, 48)
    assert after.acceptance_length > before.acceptance_length

    # 7. An operator takes version 2 back; its past is kept.
    circle.registry.rollback("demo", None, "operator", "just to see")
    until(lambda: circle.engine.lanes.version() == 1)
    assert [s.state for s in circle.registry.versions("demo")] == ["live", "rolled_back"]
    assert [e.kind for e in circle.registry.events("demo")] == ["rollback", "promote", "init"]


def test_a_trainer_killed_between_training_and_promotion_is_continued_and_nothing_is_trained_twice(
    circle: Circle, engine: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    circle.send(tiny_prompts(circle.target, 48))
    (job,) = circle.housekeeper.sweep()
    runs = []
    trained = pipeline.trained
    monkeypatch.setattr(pipeline, "trained", lambda *a: runs.append(1) or trained(*a))
    with monkeypatch.context() as dying:
        dying.setattr(pipeline, "evaluate", _die)
        with pytest.raises(KeyboardInterrupt):
            circle.adapt(circle.stores(job))
    _expire_leases(engine)
    assert circle.housekeeper.sweep() == [job]
    decision = circle.adapt(circle.stores(job))
    assert decision is not None
    assert decision.promote, decision.reason
    assert len(runs) == 1
    assert [s.version.number for s in circle.registry.versions("demo")] == [1, 2]


def test_a_trainer_that_lost_its_lease_writes_nothing_more(circle: Circle, engine: Database) -> None:
    circle.send(tiny_prompts(circle.target, 48))
    (job,) = circle.housekeeper.sweep()
    slow = circle.stores(job)
    _expire_leases(engine)
    fast = circle.stores(job)
    with pytest.raises(LeaseLost):
        circle.adapt(slow)
    decision = circle.adapt(fast)
    assert decision is not None
    assert decision.promote
    assert len(circle.registry.versions("demo")) == 2


def test_a_version_taken_back_before_its_window_was_closed_stays_back(
    circle: Circle, engine: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    circle.send(tiny_prompts(circle.target, 48))
    (job,) = circle.housekeeper.sweep()
    stores = circle.stores(job)
    with monkeypatch.context() as dying:
        dying.setattr(stores.windows, "close", _die)
        with pytest.raises(KeyboardInterrupt):
            circle.adapt(stores)
    Registry(engine).rollback("demo", None, "operator", "it looks odd")
    _expire_leases(engine)
    decision = circle.adapt(circle.stores(job))
    assert decision is not None
    assert not decision.promote
    assert circle.registry.live("demo").number == 1


def test_redis_killed_while_serving_costs_no_request_and_no_promotion(
    target: Target, engine: Database, own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    with running_circle(target, engine, own_valkey.url, tmp_path, tiny_first(target)) as circle:
        prompts = tiny_prompts(target, 8)
        clients = [ask(circle.engine, prompt, 200, workload="demo") for prompt in prompts]
        own_valkey.kill()
        assert [c.wait() for c in clients] == [plain_greedy(target, prompt, 200) for prompt in prompts]
        own_valkey.start()
        until(lambda: circle.writer.written == 8)
        circle.send(tiny_prompts(target, 40))
        (job,) = circle.housekeeper.sweep()
        decision = circle.adapt(circle.stores(job))
        assert decision is not None
        assert decision.promote, decision.reason
        until(lambda: circle.engine.lanes.version() == 2)


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _expire_leases(engine: Database) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET lease_until = '2000-01-01 00:00:00+00:00'"))
