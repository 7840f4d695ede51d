"""Servers: seen while they beat, gone when they say so or fall silent."""

import time

import pytest
from sqlalchemy import Engine, text

from storage.capabilities import Capabilities
from storage.servers import Servers


@pytest.fixture
def servers(engine: Engine) -> Servers:
    return Servers(engine)


def test_a_beat_says_what_is_applied(servers: Servers) -> None:
    servers.beat("host:1", "reference", "chat", 3, 2)
    (server,) = servers.live("chat")
    assert (server.id, server.generation, server.version, server.error) == ("host:1", 3, 2, "")


def test_a_second_beat_renews_the_first(servers: Servers) -> None:
    servers.beat("host:1", "reference", "chat", 3, 2, "weights are damaged")
    before = servers.live("chat")[0]
    time.sleep(0.01)
    servers.beat("host:1", "reference", "chat", 4, 1)
    (after,) = servers.live("chat")
    assert (after.generation, after.version, after.error) == (4, 1, "")
    assert after.last_seen > before.last_seen
    assert after.started_at == before.started_at


def test_only_servers_of_the_drafter_are_named(servers: Servers) -> None:
    servers.beat("host:2", "reference", "chat", 1, 1)
    servers.beat("host:1", "reference", "chat", 1, 1)
    servers.beat("host:3", "reference", "code", 1, 1)
    assert [server.id for server in servers.live("chat")] == ["host:1", "host:2"]


def test_a_silent_server_is_not_live(servers: Servers) -> None:
    servers.beat("host:1", "reference", "chat", 1, 1)
    time.sleep(0.2)
    assert servers.live("chat", within_seconds=0.1) == []
    assert len(servers.live("chat", within_seconds=60)) == 1


def test_a_server_that_says_goodbye_is_gone_at_once(servers: Servers) -> None:
    servers.beat("host:1", "reference", "chat", 1, 1)
    servers.gone("host:1")
    assert servers.live("chat") == []


def test_a_beat_carries_what_the_server_can_do_and_which_target_it_has(servers: Servers) -> None:
    found = Capabilities(
        "totals", False, "none", False, "none", ("causal_lm",), "llama.cpp b1", "lossy", ("synth_len=2",)
    )
    servers.beat("host:1", "sidecar_llamacpp", "chat", 1, 1, target_fingerprint="abc", capabilities=found)
    (server,) = servers.live("chat")
    assert (server.capabilities, server.target_fingerprint) == (found, "abc")
    servers.beat("host:1", "sidecar_llamacpp", "chat", 1, 1)
    (server,) = servers.live("chat")
    assert (server.capabilities, server.target_fingerprint) == (None, "")


def test_capabilities_in_the_words_of_another_redraft_are_none(servers: Servers, engine: Engine) -> None:
    servers.beat("host:1", "vllm", "chat", 1, 1)
    with engine.begin() as connection:
        connection.execute(text("""UPDATE server SET capabilities = '{"rounds": "guessed"}'"""))
    assert servers.live("chat")[0].capabilities is None


def test_hosts_are_the_servers_of_all_drafters_and_none_of_the_workers_processes(servers: Servers) -> None:
    servers.beat("host:2", "reference", "chat", 1, 1)
    servers.beat("host:1", "vllm", "code", 1, 1)
    servers.beat("host:3", "reference", "", 0, 0, "decodes plainly")
    servers.beat("trainer:host:1", "trainer", "", 0, 0)
    assert [server.id for server in servers.hosts()] == ["host:3", "host:2", "host:1"]
