"""`redraft serve`: with a drafter, before there is one, and what keeps it from starting."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter.target import Target, TargetConfig, load
from adapter.versions import Versions
from cli import attachment
from cli.attachment import Attachment
from cli.children import CHECKOUT
from cli.output import CommandError
from cli.serve import listen
from service.engine.engine import Engine, EngineConfig
from service.feedback import FeedbackConfig
from service.live import LiveConfig
from service.metrics import Metrics
from storage.config import StorageConfig
from storage.records import FeedbackRecord, decode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.routes import MANUAL, Routes
from storage.servers import Servers
from storage.stream import ADAPT, FeedbackStream
from storage.target_changes import notice, stopped
from storage.weights import WeightsStore
from tests.service.engine.oracle import UNGOVERNED, ask, first_layers
from tests.storage.rows import make_drafter
from tests.tiny import tiny_target_dir
from tests.valkey_fixture import ValkeyServer
from tests.waiting import PATIENCE, until
from worker.succession import Succession


@pytest.fixture
def storage(home: Path, valkey: ValkeyServer) -> StorageConfig:
    return StorageConfig(home=home, redis_url=valkey.url)


@contextmanager
def served(
    target: Target, registry: Registry, storage: StorageConfig, routed: bool = True, name: str = ""
) -> Iterator[tuple[Engine, Attachment, Metrics]]:
    """An engine with its attachment, started and taken down as `redraft serve` does."""
    metrics = Metrics()
    parts = (LiveConfig(live_poll_seconds=0.1), FeedbackConfig(), metrics)
    attached = Attachment(name, "host:1", target, registry, storage, *parts, routed)
    engine = Engine(target, EngineConfig(draft_length=2, slots=2, context=128), attached.finished, UNGOVERNED)
    engine.start()
    try:
        attached.start(engine)
        yield engine, attached, metrics
    finally:
        engine.stop()
        attached.close()


def make_version_1(
    target: Target, registry: Registry, store: WeightsStore, name: str = "chat", vocabulary: int | None = None
) -> None:
    """A one-layer drafter of the target."""
    drafter = first_layers(target, vocabulary=vocabulary)
    blob = Versions(store, target.files, target.embedding).save(drafter)
    prints = target.files.fingerprint, target.files.tokenizer_fingerprint
    registry.create_drafter(name, "causal_lm", *prints, drafter.config.to_dict(), blob.sha256, blob.size, "test")


def test_the_live_version_proposes_before_the_server_is_ready(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    with served(target, registry, storage) as (engine, attached, _):
        attached.wait(PATIENCE)
        assert engine.lanes.version() == 1
        until(lambda: bool(Servers(registry.engine).live("chat")))
        (server,) = Servers(registry.engine).live("chat")
        assert (server.id, server.generation, server.version) == ("host:1", 1, 1)
    assert Servers(registry.engine).live("chat") == []


def test_without_a_drafter_it_decodes_plainly_and_takes_the_first_one_up(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "LOOK_SECONDS", 0.05)
    with served(target, registry, storage) as (engine, attached, metrics):
        plain = ask(engine, [5, 6, 7], 12).wait()
        assert (attached.drafter, engine.lanes.version()) == ("", 0)
        make_version_1(target, registry, store)
        until(lambda: engine.lanes.version() == 1)
        drafted = ask(engine, [5, 6, 7], 12).wait()
        assert attached.drafter == "chat"
        assert b'redraft_live_version{drafter="chat"} 1.0' in metrics.text()
    assert drafted == plain
    with consume(storage.stream_url) as client:
        ((_, data),) = FeedbackStream(client, "chat").read(ADAPT, "test", 10).entries
    record = decode(data)
    assert (record.drafter, list(record.prompt)) == ("chat", [5, 6, 7])
    assert {round_.version for round_ in record.rounds} == {1}


def records(storage: StorageConfig, drafter: str) -> list[FeedbackRecord]:
    with consume(storage.stream_url) as client:
        return [decode(data) for _, data in FeedbackStream(client, drafter).read(ADAPT, "test", 10).entries]


def test_a_drafter_that_a_route_names_gets_its_workload_its_feedback_and_its_row(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    make_version_1(target, registry, store, "for-sql", vocabulary=150)
    routes, servers, target_id = Routes(registry.engine), Servers(registry.engine), target.files.fingerprint
    routes.put(target_id, "sql", "for-sql", MANUAL, "test")
    with served(target, registry, storage) as (engine, attached, metrics):
        attached.wait(PATIENCE)
        assert [engine.lanes.version(lane) for lane in ("", "for-sql")] == [1, 1]
        outputs = [ask(engine, [5, 6, 7], 12, workload=workload).wait() for workload in ("default", "sql")]
        assert outputs[0] == outputs[1]
        assert [s.id for s in servers.live("for-sql")] == ["host:1/for-sql"]
        assert b'spec_decode_num_drafts_total{drafter="for-sql",version="1",workload="sql"}' in metrics.text()

        routes.remove(target_id, "sql", MANUAL, "test")
        until(lambda: engine.lanes.version("for-sql") == 0)
        assert servers.live("for-sql") == []
        ask(engine, [5, 6, 7], 12, workload="sql").wait()
        make_version_1(target, registry, store, "for-code")
        routes.put(target_id, "code", "for-code", MANUAL, "test")
        until(lambda: engine.lanes.version("for-code") == 1)
    assert servers.live("for-code") == []
    found = [[(r.workload, r.drafter) for r in records(storage, name)] for name in ("chat", "for-sql")]
    assert found == [[("default", "chat"), ("sql", "chat")], [("sql", "for-sql")]]


def test_a_route_to_a_drafter_of_no_use_leaves_its_workload_with_the_default_one(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    make_drafter(registry, "no-weights", target.files.fingerprint)
    Routes(registry.engine).put(target.files.fingerprint, "sql", "no-weights", MANUAL, "test")
    with served(target, registry, storage) as (engine, attached, _):
        attached.wait(PATIENCE)
        client = ask(engine, [5, 6, 7], 12, workload="sql")
        assert {r.version for r in client.usage.rounds} == {1}
    assert [r.drafter for r in records(storage, "chat")] == ["chat"]


def test_where_routing_is_off_routes_are_not_followed(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    make_version_1(target, registry, store, "for-sql")
    Routes(registry.engine).put(target.files.fingerprint, "sql", "for-sql", MANUAL, "test")
    with served(target, registry, storage, routed=False) as (engine, attached, _):
        attached.wait(PATIENCE)
        assert engine.lanes.version("for-sql") == 0
        ask(engine, [5, 6, 7], 12, workload="sql").wait()
    assert [r.drafter for r in records(storage, "chat")] == ["chat"]


def test_several_drafters_of_one_target_are_no_reason_not_to_serve(
    target: Target, registry: Registry, storage: StorageConfig
) -> None:
    for name in ("a", "b"):
        make_drafter(registry, name, target.files.fingerprint)
    with served(target, registry, storage) as (engine, _, _):
        assert engine.lanes.version() == 0
        assert engine.alive


@pytest.mark.parametrize("asked_for", ["chat", ""])
def test_a_target_that_changed_is_served_plainly_and_stops_its_drafter_until_it_is_back(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig, asked_for: str
) -> None:
    make_drafter(registry, "chat", "the target before")
    with served(target, registry, storage, name=asked_for) as (engine, _, _):
        assert len(ask(engine, [5, 6, 7], 12).wait()) > 0
        change = stopped(registry.engine)["chat"]
        assert (change.seen, change.seen_by) == (target.files.fingerprint, "server host:1")
        (server,) = Servers(registry.engine).hosts()
        assert (server.drafter, server.target_fingerprint) == ("", target.files.fingerprint)
        assert server.error.startswith("decodes plainly: ")
    assert Servers(registry.engine).hosts() == []
    assert registry.drafter("chat").retired_at is None


def test_a_server_of_the_old_target_that_starts_again_lets_adaptation_go_on(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    notice(registry.engine, "chat", "another target", "server", "server host:1")
    with served(target, registry, storage):
        assert stopped(registry.engine) == {}


def test_a_server_takes_up_what_goes_on_from_its_drafter_for_the_new_target(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From the change of the target to the new lineage at work; only the ringing of bells is left out."""
    monkeypatch.setattr(attachment, "LOOK_SECONDS", 0.05)
    before = tiny_target_dir(tmp_path / "before", seed=1, layers=3)
    make_version_1(load(TargetConfig(str(before), "fp32", "cpu", tmp_path / "cache")), registry, store)
    with served(target, registry, storage, name="chat") as (engine, attached, _):
        plain = ask(engine, [5, 6, 7], 12).wait()
        assert engine.lanes.version() == 0
        (name,) = Succession(registry, store, Versions(store, target.files, target.embedding)).go_on()
        until(lambda: engine.lanes.version() == 1)
        assert attached.drafter == name
        assert ask(engine, [5, 6, 7], 12).wait() == plain
        assert stopped(registry.engine)["chat"].successor == name


def test_a_drafter_that_another_server_still_serves_is_not_stopped(
    target: Target, registry: Registry, storage: StorageConfig
) -> None:
    make_drafter(registry, "chat", "the target before")
    Servers(registry.engine).beat("host:2", "reference", "chat", 1, 1, target_fingerprint="the target before")
    with served(target, registry, storage, name="chat"):
        assert stopped(registry.engine) == {}


def test_a_server_says_what_it_can_do(
    target: Target, registry: Registry, store: WeightsStore, storage: StorageConfig
) -> None:
    make_version_1(target, registry, store)
    with served(target, registry, storage):
        until(lambda: bool(Servers(registry.engine).hosts()))
        (server,) = Servers(registry.engine).hosts()
    assert server.target_fingerprint == target.files.fingerprint
    assert server.capabilities is not None
    assert (server.capabilities.rounds, server.capabilities.losslessness) == ("exact", "lossless")


def test_a_port_in_use_is_named_with_the_setting() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(CommandError, match=rf"127.0.0.1:{port} .*REDRAFT_PORT"):
            listen("127.0.0.1", port)


def test_an_ipv6_address_can_be_listened_on() -> None:
    with listen("::1", 0) as listener:
        assert listener.family is socket.AF_INET6


def test_it_does_not_start_on_a_database_that_is_not_migrated(tmp_path: Path) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("REDRAFT_")}
    environ = {**given, "PYTHONPATH": str(CHECKOUT), "REDRAFT_HOME": str(tmp_path), "REDRAFT_PORT": "0"}
    command = [sys.executable, "-m", "cli", "serve"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the database is at revision none")
    assert "run `redraft migrate`" in done.stderr
    assert not (tmp_path / "operator.key").exists()
