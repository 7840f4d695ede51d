"""Routes: set by an operator or the machine, told to the servers, and what an operator set stays."""

import threading

import pytest
from sqlalchemy import Engine, text

from storage import audit, outbox
from storage.registry import Registry, UnknownDrafter
from storage.routes import GENERAL, LEARNED, MANUAL, NOVEL, RouteIsManual, RouteRefused, Routes
from tests.storage.rows import make_drafter

TARGET = "target-1"


@pytest.fixture
def registry(engine: Engine) -> Registry:
    registry = Registry(engine)
    for name in ("chat", "sql", "code"):
        make_drafter(registry, name)
    return registry


@pytest.fixture
def routes(registry: Registry) -> Routes:
    return Routes(registry.engine)


def test_a_route_says_which_drafter_since_when_and_why(routes: Routes) -> None:
    assert routes.of(TARGET) == []
    assert routes.put(TARGET, "spider", "sql", MANUAL, "me", "it is for SQL")
    (route,) = routes.of(TARGET)
    assert (route.workload, route.drafter, route.cause) == ("spider", "sql", MANUAL)
    assert (route.actor, route.reason, route.weights) == ("me", "it is for SQL", {})
    assert routes.of("target-2") == []


def test_every_change_has_a_generation_an_audit_row_and_a_message(routes: Routes) -> None:
    assert routes.generation(TARGET) == 0
    routes.put(TARGET, "spider", "sql", LEARNED, "routing", "weight 0.97")
    routes.put(TARGET, "spider", "code", LEARNED, "routing", "weight 0.95")
    assert routes.remove(TARGET, "spider", LEARNED, "routing", "weight 0.4")
    assert routes.generation(TARGET) == 3
    assert routes.generation("target-2") == 0
    told = [m.payload for m in outbox.pending(routes.engine) if m.topic == outbox.ROUTES_TOPIC]
    assert told == [{"target": TARGET, "generation": n} for n in (1, 2, 3)]
    changes = [("route.put", "weight 0.97"), ("route.put", "weight 0.95"), ("route.remove", "weight 0.4")]
    assert _audited(routes.engine) == changes
    assert audit.verify(routes.engine) is None


def test_the_same_route_again_changes_nothing(routes: Routes) -> None:
    assert routes.put(TARGET, "spider", "sql", LEARNED, "routing")
    assert not routes.put(TARGET, "spider", "sql", LEARNED, "routing")
    assert not routes.remove(TARGET, "other", LEARNED, "routing")
    assert routes.generation(TARGET) == 1


@pytest.mark.parametrize("cause", [LEARNED, NOVEL])
def test_the_machine_does_not_change_what_an_operator_set(routes: Routes, cause: str) -> None:
    routes.put(TARGET, "spider", "sql", MANUAL, "me")
    with pytest.raises(RouteIsManual, match="spider was routed by me"):
        routes.put(TARGET, "spider", "code", cause, "routing")
    with pytest.raises(RouteIsManual):
        routes.remove(TARGET, "spider", cause, "routing")
    assert routes.of(TARGET)[0].drafter == "sql"
    assert routes.generation(TARGET) == 1


def test_an_operator_changes_what_the_machine_set(routes: Routes) -> None:
    routes.put(TARGET, "spider", "sql", LEARNED, "routing")
    assert routes.put(TARGET, "spider", "sql", MANUAL, "me", "keep it")
    assert (routes.of(TARGET)[0].cause, routes.of(TARGET)[0].actor) == (MANUAL, "me")
    assert routes.remove(TARGET, "spider", MANUAL, "me")
    assert routes.of(TARGET) == []


def test_an_operator_may_hold_a_workload_on_the_general_drafter(routes: Routes) -> None:
    routes.put(TARGET, "spider", GENERAL, MANUAL, "me")
    assert routes.of(TARGET)[0].drafter == GENERAL
    with pytest.raises(RouteIsManual):
        routes.put(TARGET, "spider", "sql", LEARNED, "routing")


def test_a_drafter_that_cannot_be_routed_to_is_refused(routes: Routes, registry: Registry) -> None:
    make_drafter(registry, "foreign", target="target-2")
    registry.retire_drafter("code", "me")
    with pytest.raises(RouteRefused, match="another target"):
        routes.put(TARGET, "spider", "foreign", MANUAL, "me")
    with pytest.raises(RouteRefused, match="retired"):
        routes.put(TARGET, "spider", "code", MANUAL, "me")
    with pytest.raises(UnknownDrafter):
        routes.put(TARGET, "spider", "nobody", MANUAL, "me")
    assert routes.generation(TARGET) == 0


def test_a_retired_drafters_workloads_go_back_to_the_general_one(routes: Routes, registry: Registry) -> None:
    routes.put(TARGET, "spider", "sql", MANUAL, "me")
    routes.put(TARGET, "python", "code", LEARNED, "routing")
    registry.retire_drafter("sql", "me")
    assert [route.workload for route in routes.of(TARGET)] == ["python"]
    assert routes.generation(TARGET) == 3


def test_the_general_drafter_is_the_one_that_is_not_routed(routes: Routes, registry: Registry) -> None:
    with pytest.raises(UnknownDrafter, match="several"):
        registry.choose("", TARGET)
    routes.put(TARGET, "spider", "sql", MANUAL, "me")
    routes.put(TARGET, "python", "code", MANUAL, "me")
    assert registry.choose("", TARGET).name == "chat"
    assert registry.choose("sql", TARGET).name == "sql"


def test_the_general_drafter_stays_general_when_a_route_goes(engine: Engine) -> None:
    registry, routes = Registry(engine), Routes(engine)
    make_drafter(registry)
    make_drafter(registry, "sql")
    routes.put(TARGET, "spider", "sql", MANUAL, "me")
    routes.remove(TARGET, "spider", MANUAL, "me")
    assert registry.choose("", TARGET).name == registry.choose("").name == "chat"
    registry.retire_drafter("chat", "me")
    assert registry.choose("", TARGET).name == "sql"


def test_a_target_whose_only_drafter_is_routed_has_that_one(engine: Engine) -> None:
    registry = Registry(engine)
    make_drafter(registry)
    Routes(engine).put(TARGET, "spider", "chat", MANUAL, "me")
    assert registry.choose("", TARGET).name == "chat"


def test_changes_at_once_take_turns(routes: Routes) -> None:
    def run(name: str) -> None:
        for n in range(5):
            routes.put(TARGET, f"{name}{n}", "sql", LEARNED, name)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert routes.generation(TARGET) == len(routes.of(TARGET)) == 15


def _audited(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT action, reason FROM audit_log WHERE action LIKE 'route.%' ORDER BY id"))
        return [(action, reason) for action, reason in found]
