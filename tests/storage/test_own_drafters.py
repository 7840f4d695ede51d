"""Drafters of their own: a copy of the general one with its route, a bounded number, and given back whole."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from storage import audit, exposure, garbage, marks
from storage.database import reading, transaction
from storage.own_drafters import OwnDrafters
from storage.registry import Registry
from storage.routes import MANUAL, NOVEL, Routes
from storage.standings import Standing, Standings
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import make_candidate, make_drafter, make_record

TARGET = "target-1"


@pytest.fixture
def registry(engine: Engine) -> Registry:
    make_drafter(Registry(engine))
    return Registry(engine)


@pytest.fixture
def own(registry: Registry) -> OwnDrafters:
    return OwnDrafters(registry.engine)


def test_it_starts_as_a_copy_of_the_general_drafter_and_is_routed_to(
    own: OwnDrafters, registry: Registry, tmp_path: Path
) -> None:
    first = registry.live("chat")
    second = make_candidate(registry, WeightsStore(tmp_path), first, "a")
    registry.promote(second, first, "me", "it is better")
    assert _make(own, "sql") == "chat--sql"
    made, live = registry.drafter("chat--sql"), registry.live("chat--sql")
    general = registry.drafter("chat")
    assert (made.kind, made.config, made.tokenizer_fingerprint) == (general.kind, general.config, "tokenizer-1")
    assert (live.number, live.parent, live.weights_sha256) == (1, None, second.weights_sha256)
    (route,) = Routes(own.engine).of(TARGET)
    assert (route.workload, route.drafter, route.cause, route.reason) == ("sql", "chat--sql", NOVEL, "it lags")
    assert [(o.name, o.workload) for o in own.of(TARGET)] == [("chat--sql", "sql")]


def test_what_was_made_and_why_stands_in_the_audit_log(own: OwnDrafters) -> None:
    _make(own, "sql")
    with own.engine.connect() as connection:
        found = connection.execute(text("SELECT subject, reason FROM audit_log WHERE action = 'drafter.own'")).all()
    assert [tuple(row) for row in found] == [("drafter/chat--sql", "it lags")]
    assert audit.verify(own.engine) is None


def test_the_general_drafter_is_still_the_one_that_is_chosen(own: OwnDrafters, registry: Registry) -> None:
    _make(own, "sql")
    _make(own, "code")
    assert registry.choose("", TARGET).name == "chat"
    own.give_back(own.of(TARGET)[0], "routing", "silence")
    assert registry.choose("", TARGET).name == "chat"


def test_there_are_at_most_as_many_as_asked_for(own: OwnDrafters) -> None:
    assert _make(own, "a", at_most=2)
    assert _make(own, "b", at_most=2)
    assert _make(own, "c", at_most=2) is None
    own.give_back(own.of(TARGET)[0], "routing", "silence")
    assert _make(own, "c", at_most=2)
    assert [o.workload for o in own.of(TARGET)] == ["b", "c"]


def test_several_that_make_at_once_keep_to_the_bound(own: OwnDrafters) -> None:
    threads = [threading.Thread(target=_make, args=(own, name, 2)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(own.of(TARGET)) == len(Routes(own.engine).of(TARGET)) == 2


def test_a_workload_with_a_route_gets_none(own: OwnDrafters) -> None:
    Routes(own.engine).put(TARGET, "sql", "", MANUAL, "me")
    assert _make(own, "sql") is None
    assert own.of(TARGET) == []


def test_given_back_it_is_retired_and_its_workload_is_the_general_ones_again(
    own: OwnDrafters, registry: Registry, tmp_path: Path
) -> None:
    _make(own, "sql")
    windows = Windows(own.engine, WeightsStore(tmp_path))
    window = windows.keep("chat", (make_record("a"),), ())
    assert window is not None
    Standings(own.engine).revise(TARGET, window.id, lambda known: {"sql": {"chat": Standing(1, 1.0, {}, 9)}})
    (mine,) = own.of(TARGET)
    assert own.give_back(mine, "routing", "nothing came in")
    assert not own.give_back(mine, "routing", "nothing came in")
    assert registry.drafter("chat--sql").retired_at is not None
    assert (own.of(TARGET), Routes(own.engine).of(TARGET), Standings(own.engine).of(TARGET)) == ([], [], {})


def test_what_an_operator_routed_to_it_keeps_it(own: OwnDrafters) -> None:
    _make(own, "sql")
    Routes(own.engine).put(TARGET, "spider", "chat--sql", MANUAL, "me")
    assert not own.give_back(own.of(TARGET)[0], "routing", "nothing came in")
    assert len(Routes(own.engine).of(TARGET)) == 2


def test_it_is_idle_since_its_last_window(own: OwnDrafters, tmp_path: Path) -> None:
    _make(own, "sql")
    with own.engine.begin() as connection:
        connection.execute(text("UPDATE own_drafter SET at = '2026-01-01 00:00:00+00:00'"))
    assert own.of(TARGET)[0].idle_hours > 24
    Windows(own.engine, WeightsStore(tmp_path)).keep("chat--sql", (make_record("a"),), ())
    assert own.of(TARGET)[0].idle_hours < 1


def test_its_weights_are_kept_when_the_general_drafters_version_is_not(
    own: OwnDrafters, registry: Registry, tmp_path: Path
) -> None:
    _make(own, "sql")
    with transaction(own.engine) as session:
        marks.put(session, registry.live("chat").id, marks.WEIGHTS_DELETED, "me", "it is old")
    with reading(own.engine) as session:
        assert registry.live("chat--sql").weights_sha256 in set(garbage.named(session))


def test_it_descends_from_what_the_general_drafter_learnt(own: OwnDrafters, registry: Registry, tmp_path: Path) -> None:
    first = registry.live("chat")
    second = make_candidate(registry, WeightsStore(tmp_path), first, "a", tenant="acme")
    registry.promote(second, first, "me", "it is better")
    _make(own, "sql")
    with reading(own.engine) as session:
        general, mine = exposure.exposed(session, "acme")
    assert (general.drafter, general.number, mine.drafter, mine.number) == ("chat", 2, "chat--sql", 1)
    assert mine.how == "descends from version 2 of chat"


def _make(own: OwnDrafters, workload: str, at_most: int = 4) -> str | None:
    return own.make("chat", workload, at_most, lambda taken: f"chat--{workload}", "routing", "it lags")
