"""`redraft hosts`: what is attached, what it can do, what is lossy, and how far each kind was checked."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from service.hosts.capabilities import HOSTS, HostRefused, check_kind, host_of
from storage.capabilities import Capabilities
from storage.registry import Registry
from storage.servers import Servers
from storage.target_changes import notice
from tests.cli.conftest import Run
from tests.storage.rows import make_drafter


@pytest.fixture
def servers(database: Engine) -> Servers:
    return Servers(database)


def lossy(name: str) -> Capabilities:
    found = host_of(name).capabilities
    return replace(found, engine="vllm 0.33.0", losslessness="lossy", lossy_settings=("rejection_sample_method=fly",))


def test_every_kind_of_host_is_listed_with_how_it_was_checked(redraft: Run) -> None:
    found = json.loads(redraft("hosts", "--json").stdout)
    assert found["servers"] == []
    assert {host["name"] for host in found["hosts"]} == HOSTS.keys()
    assert {host["checked"] for host in found["hosts"]} <= {"live", "contract", "designed"}
    shown = redraft("hosts").stdout
    assert "no server gave a sign of life" in shown
    assert all(name in shown for name in HOSTS)


def test_an_attached_host_shows_what_it_found_of_itself(redraft: Run, servers: Servers) -> None:
    servers.beat("host:1", "vllm", "chat", 1, 1, target_fingerprint="t" * 64, capabilities=lossy("vllm"))
    servers.beat("trainer:host:1", "trainer", "", 0, 0)
    (server,) = json.loads(redraft("hosts", "--json").stdout)["servers"]
    assert (server["id"], server["target_fingerprint"], server["reported"]) == ("host:1", "t" * 64, True)
    assert server["capabilities"]["engine"] == "vllm 0.33.0"
    assert server["checked"] == HOSTS["vllm"].checked


def test_a_lossy_host_is_named_with_the_setting_that_makes_it_so(redraft: Run, servers: Servers) -> None:
    servers.beat("host:1", "vllm", "chat", 1, 1, capabilities=lossy("vllm"))
    unsure = host_of("sidecar_llamacpp").capabilities
    servers.beat("host:2", "sidecar_llamacpp", "chat", 1, 1, capabilities=unsure)
    result = redraft("hosts")
    assert "host:1 is LOSSY (rejection_sample_method=fly)" in result.stderr
    assert "host:2 does not say whether it is lossless" in result.stderr


def test_a_host_that_says_nothing_of_itself_is_shown_as_its_kind_is_at_best(redraft: Run, servers: Servers) -> None:
    servers.beat("host:1", "reference", "chat", 1, 1)
    servers.beat("host:2", "one of tomorrow's", "chat", 1, 1)
    known, unknown = json.loads(redraft("hosts", "--json").stdout)["servers"]
    assert (known["reported"], known["capabilities"]["rounds"]) == (False, "exact")
    assert (unknown["capabilities"], unknown["checked"]) == (None, None)
    assert "host:2" in redraft("hosts").stdout


def test_a_stopped_drafter_is_named_by_hosts_versions_and_doctor_with_what_to_do(
    redraft: Run, registry: Registry, database: Engine
) -> None:
    make_drafter(registry, "chat", "target-1")
    notice(database, "chat", "target-2", "server", "server host:1")
    for command in ("hosts", "versions"):
        assert "adaptation of chat is stopped" in redraft(command).stderr
    assert "redraft init NAME" in json.loads(redraft("hosts", "--json").stdout)["stopped"][0]["reason"]
    (version,) = json.loads(redraft("versions", "--json").stdout)
    assert "adaptation of chat is stopped" in version["stopped"]
    found = {look["name"]: look for look in json.loads(redraft("doctor", "--json").stdout)}
    assert found["targets"]["state"] == "failed"
    make_drafter(registry, "chat-2", "target-2")
    found = {look["name"]: look for look in json.loads(redraft("doctor", "--json").stdout)}
    assert found["targets"]["state"] == "ok"
    assert "drafter chat-2 is for the new target" in found["targets"]["detail"]


def test_doctor_finds_a_lossy_host(redraft: Run, servers: Servers) -> None:
    servers.beat("host:1", "vllm", "chat", 1, 1, capabilities=lossy("vllm"))
    found = {look["name"]: look for look in json.loads(redraft("doctor", "--json").stdout)}
    assert found["hosts"]["state"] == "failed"
    assert "rejection_sample_method=fly" in found["hosts"]["detail"]


@pytest.mark.parametrize(("host", "kind"), [("vllm", "eagle"), ("llamacpp", "medusa"), ("sglang", "streaming")])
def test_a_kind_that_a_host_cannot_serve_is_refused_with_the_reason(host: str, kind: str) -> None:
    with pytest.raises(HostRefused, match=rf"cannot serve a {kind} drafter: .*use causal_lm"):
        check_kind(host, kind)


def test_what_a_host_can_serve_is_let_through_and_an_unknown_host_named() -> None:
    check_kind("vllm", "causal_lm")
    check_kind("reference", "streaming")
    with pytest.raises(HostRefused, match="use reference, vllm"):
        check_kind("tgi", "causal_lm")
