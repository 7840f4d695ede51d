"""Targets that change under a drafter: the drafter is stopped until its target is back, and another goes on from it."""

import pytest
from sqlalchemy import Engine, select

from storage.audit import verify
from storage.database import reading
from storage.registry import Registry, UnknownDrafter, WrongDrafter
from storage.tables import AuditRow
from storage.target_changes import notice, settle, stopped
from tests.storage.rows import make_drafter


@pytest.fixture
def registry(engine: Engine) -> Registry:
    return Registry(engine)


def test_a_drafter_whose_target_changed_is_stopped_and_says_why_and_what_to_do(
    engine: Engine, registry: Registry
) -> None:
    make_drafter(registry, "chat", "target-1")
    assert notice(engine, "chat", "target-2", "server", "server host:1")
    change = stopped(engine)["chat"]
    assert (change.made_for, change.seen, change.successor) == ("target-1", "target-2", "")
    assert "adaptation of chat is stopped" in change.reason
    assert "server host:1 has target target-2" in change.reason
    assert "`redraft init NAME`" in change.reason
    assert verify(engine) is None


def test_the_drafter_itself_stays_with_all_its_versions(engine: Engine, registry: Registry) -> None:
    version = make_drafter(registry, "chat", "target-1")
    notice(engine, "chat", "target-2", "server", "server host:1")
    assert registry.live("chat") == version
    assert registry.choose("", "target-1").name == "chat"


def test_the_same_change_is_noticed_once(engine: Engine, registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    assert notice(engine, "chat", "target-2", "server", "server host:1")
    assert not notice(engine, "chat", "target-2", "server", "server host:2")
    assert notice(engine, "chat", "target-3", "server", "server host:2")
    assert stopped(engine)["chat"].seen == "target-3"


def test_a_drafters_own_target_is_no_change(engine: Engine, registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    assert not notice(engine, "chat", "target-1", "server", "server host:1")
    assert stopped(engine) == {}


def test_when_the_target_is_back_adaptation_goes_on(engine: Engine, registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    for witness in ("server", "records"):
        notice(engine, "chat", "target-2", witness, "host sidecar")
    assert settle(engine, "chat", "server host:1")
    assert stopped(engine) == {}
    assert not settle(engine, "chat", "server host:1")


def test_what_the_trainer_saw_only_a_trainer_takes_back(engine: Engine, registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    notice(engine, "chat", "target-2", "trainer", "the trainer")
    notice(engine, "chat", "target-2", "server", "server host:1")
    settle(engine, "chat", "server host:1")
    assert stopped(engine).keys() == {"chat"}
    settle(engine, "chat", "the trainer", ("trainer",))
    assert stopped(engine) == {}


def test_the_audit_says_that_a_drafter_stays_stopped_while_another_witness_stands(
    engine: Engine, registry: Registry
) -> None:
    make_drafter(registry, "chat", "target-1")
    notice(engine, "chat", "target-2", "trainer", "the trainer")
    notice(engine, "chat", "target-2", "server", "server host:1")
    settle(engine, "chat", "server host:1")
    settle(engine, "chat", "the trainer", ("trainer",))
    with reading(engine) as session:
        back = select(AuditRow.actor, AuditRow.after).where(AuditRow.action == "drafter.target_back")
        assert session.execute(back.order_by(AuditRow.id)).tuples().all() == [
            ("server host:1", {"stopped": True}), ("the trainer", {"stopped": False}),
        ]  # fmt: skip


def test_a_retired_drafter_is_not_among_the_stopped(engine: Engine, registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    notice(engine, "chat", "target-2", "server", "server host:1")
    registry.retire_drafter("chat", "tester")
    assert stopped(engine) == {}


def succeed(registry: Registry, name: str, target: str, predecessor: str) -> None:
    registry.create_drafter(name, "causal_lm", target, "tokenizer-1", {}, "a" * 64, 10, "tester", predecessor)


def test_a_successor_is_chosen_in_its_predecessors_place_for_its_own_target_alone(
    engine: Engine, registry: Registry
) -> None:
    make_drafter(registry, "chat", "target-1")
    succeed(registry, "chat-2", "target-2", "chat")
    succeed(registry, "chat-3", "target-3", "chat-2")
    assert [registry.choose("chat", f"target-{n}").name for n in (1, 2, 3)] == ["chat", "chat-2", "chat-3"]
    with pytest.raises(WrongDrafter, match="made for another target"):
        registry.choose("chat", "target-4")
    notice(engine, "chat", "target-2", "server", "server host:1")
    assert stopped(engine)["chat"].successor == "chat-2"
    assert "drafter chat-2 is for the new target" in stopped(engine)["chat"].reason


def test_a_retired_successor_is_not_chosen(registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    succeed(registry, "chat-2", "target-2", "chat")
    registry.retire_drafter("chat-2", "tester")
    with pytest.raises(WrongDrafter):
        registry.choose("chat", "target-2")


def test_a_predecessor_that_is_not_there_makes_no_drafter(registry: Registry) -> None:
    with pytest.raises(UnknownDrafter):
        succeed(registry, "chat-2", "target-2", "chat")
    assert registry.drafters(include_retired=True) == []
