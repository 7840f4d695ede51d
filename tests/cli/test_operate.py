"""Moving what is live: `promote` and `rollback` return when every live server serves it, or name those that do not."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine

from storage import audit, outbox
from storage.announcements import Announcements
from storage.registry import Registry
from storage.servers import Servers
from storage.weights import WeightsStore
from tests.cli.conftest import Run
from tests.storage.rows import make_candidate, make_drafter
from tests.valkey_fixture import ValkeyServer
from tests.waiting import PATIENCE, until


@pytest.fixture(autouse=True)
def _two_versions(
    registry: Registry, store: WeightsStore, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 replaced version 1; Redis is there."""
    monkeypatch.setenv("REDRAFT_REDIS_URL", valkey.url)
    first = make_drafter(registry)
    registry.promote(make_candidate(registry, store, first, "a"), first, "test", "better")


@pytest.fixture
def servers(database: Engine) -> Servers:
    """One server, which serves version 2 as it should."""
    found = Servers(database)
    found.beat("host:1", "reference", "chat", generation=2, version=2)
    return found


@contextmanager
def following(servers: Servers, registry: Registry, server_id: str, url: str) -> Iterator[threading.Event]:
    """A server that acknowledges as soon as it hears the message; the event tells that it heard one."""
    announcements, heard = Announcements(url, "chat"), threading.Event()
    until(lambda: announcements.wait(0.1) or announcements.connected)  # subscribes

    def follow() -> None:
        if announcements.wait(PATIENCE):
            heard.set()
            pointer = registry.pointer("chat")
            servers.beat(server_id, "reference", "chat", pointer.generation, pointer.live.number)

    thread = threading.Thread(target=follow)
    thread.start()
    yield heard
    thread.join()
    announcements.close()


def test_a_rollback_returns_when_the_server_has_followed(
    redraft: Run, registry: Registry, servers: Servers, valkey: ValkeyServer
) -> None:
    with following(servers, registry, "host:1", valkey.url) as heard:
        result = redraft("rollback", "--reason", "worse on code", "--json")
    moved = json.loads(result.stdout)
    assert result.exit_code == 0
    assert heard.is_set()
    assert (moved["version"], moved["generation"], moved["acknowledged"]) == (1, 3, ["host:1"])
    assert moved["milliseconds"] > 0
    assert registry.live("chat").number == 1


def test_a_rollback_keeps_who_did_it_and_why(redraft: Run, registry: Registry, database: Engine) -> None:
    redraft("rollback", "--reason", "worse on code")
    event = registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.reason) == ("rollback", 2, 1, "worse on code")
    assert event.actor.startswith("cli:")
    assert audit.verify(database) is None


def test_a_server_that_has_not_followed_is_named_with_its_error(redraft: Run, servers: Servers) -> None:
    servers.beat("host:2", "reference", "chat", generation=2, version=2, error="version 1: the file is damaged")
    result = redraft("rollback", "--reason", "x", "--wait", "0.2")
    assert result.exit_code == 1
    assert "host:1; host:2 (version 1: the file is damaged)" in result.stderr


def test_a_server_that_was_not_heard_of_lately_is_not_waited_for(redraft: Run, servers: Servers) -> None:
    servers.gone("host:1")
    result = redraft("rollback", "--reason", "x")
    assert result.exit_code == 0
    assert "no server is running" in result.stdout


def test_without_redis_the_move_is_made_and_said_to_be_slower(
    redraft: Run, registry: Registry, database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_REDIS_URL", "redis://127.0.0.1:1/0")
    result = redraft("rollback", "--reason", "x")
    assert result.exit_code == 0
    assert "Redis cannot be reached" in result.stderr
    assert registry.live("chat").number == 1
    assert [message.payload["generation"] for message in outbox.pending(database)] == [1, 2, 3]


def test_what_was_announced_leaves_the_outbox(redraft: Run, database: Engine) -> None:
    redraft("rollback", "--reason", "x")
    assert outbox.pending(database) == []


def test_a_rollback_can_name_its_version_and_a_promotion_goes_forward_again(redraft: Run, registry: Registry) -> None:
    assert redraft("rollback", "--to", "1", "--reason", "x").exit_code == 0
    assert registry.live("chat").number == 1
    assert redraft("promote", "2", "--reason", "it was not the cause").exit_code == 0
    assert registry.live("chat").number == 2
    assert [event.kind for event in registry.events("chat")] == ["promote", "rollback", "promote", "init"]


def test_there_must_be_something_to_go_back_to(redraft: Run) -> None:
    redraft("rollback", "--reason", "x")
    result = redraft("rollback", "--reason", "x")
    assert result.exit_code == 1
    assert "replaced none" in result.stderr


@pytest.mark.parametrize("command", [["rollback"], ["promote", "1"]])
def test_a_reason_is_asked_for(redraft: Run, registry: Registry, command: list[str]) -> None:
    assert redraft(*command).exit_code == 2
    assert redraft(*command, "--reason", "  ").exit_code == 1
    assert registry.pointer("chat").generation == 2


def test_an_unknown_version_moves_nothing(redraft: Run, registry: Registry) -> None:
    result = redraft("promote", "7", "--reason", "x")
    assert result.exit_code == 1
    assert "no version 7" in result.stderr
    assert registry.pointer("chat").generation == 2


def test_servers_are_listed_with_what_they_lag_behind(redraft: Run, registry: Registry, servers: Servers) -> None:
    servers.beat("beat:host:9", "beat", "", generation=0, version=0)
    registry.rollback("chat", None, "test", "x")
    lines = [" ".join(line.split()) for line in redraft("servers").stdout.splitlines()]
    assert any(line.startswith("host:1 reference chat 2 2 3, behind") for line in lines)
    assert any(line.startswith("beat:host:9 beat - -") for line in lines)
    listed = json.loads(redraft("servers", "--json").stdout)
    assert [(s["id"], s["generation"]) for s in listed] == [("host:1", 2), ("beat:host:9", 0)]


def test_without_servers_the_list_says_what_starts_them(redraft: Run) -> None:
    assert "redraft up" in redraft("servers").stdout


def test_alive_is_the_age_of_the_last_sign_of_life_on_this_host(redraft: Run, database: Engine) -> None:
    import socket

    servers = Servers(database)
    servers.beat("trainer:elsewhere:1", "trainer", "", generation=0, version=0)
    assert redraft("alive", "trainer").exit_code == 1
    servers.beat(f"trainer:{socket.gethostname()}:1", "trainer", "", generation=0, version=0)
    assert redraft("alive", "trainer").exit_code == 0
    assert redraft("alive", "beat").exit_code == 1
    assert redraft("alive", "trainer", "--within", "0").exit_code == 1
