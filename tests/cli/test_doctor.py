"""`redraft doctor`: finds what is wrong with each part, and says how to mend it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from adapter.target import TargetConfig, fetch
from storage.records import encode
from storage.redis_clients import admin
from storage.registry import Registry
from storage.servers import Servers
from storage.stream import HISTORY, FeedbackStream
from storage.weights import WeightsStore
from tests.cli.conftest import Run
from tests.storage.rows import make_record
from tests.valkey_fixture import ValkeyServer

Examine = Callable[[], dict[str, dict[str, Any]]]
WORKERS = ("trainer", "housekeeper", "beat")


@pytest.fixture
def examine(redraft: Run) -> Examine:
    """The findings by the name of the check."""
    return lambda: {found["name"]: found for found in json.loads(redraft("doctor", "--json").stdout)}


@pytest.fixture
def healthy(
    registry: Registry,
    store: WeightsStore,
    database: Engine,
    target_dir: Path,
    valkey: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Servers:
    """Everything is as it should be, as far as SQL, Redis and the disk can tell."""
    monkeypatch.setenv("REDRAFT_TARGET", str(target_dir))
    monkeypatch.setenv("REDRAFT_CACHE", str(target_dir / "cache"))
    monkeypatch.setenv("REDRAFT_REDIS_URL", valkey.url)
    monkeypatch.setenv("REDRAFT_PORT", "1")  # nothing listens there
    files, blob = fetch(TargetConfig(target=str(target_dir), cache=target_dir / "cache")), store.put(b"weights")
    fingerprints = files.fingerprint, files.tokenizer_fingerprint
    registry.create_drafter("chat", "causal_lm", *fingerprints, {}, blob.sha256, blob.size, "test")
    servers = Servers(database)
    servers.beat("host:1", "reference", "chat", generation=1, version=1)
    for role in WORKERS:
        servers.beat(f"{role}:host:1", role, "", generation=0, version=0)
    return servers


@pytest.mark.usefixtures("healthy")
def test_a_healthy_house_passes_every_check(redraft: Run, examine: Examine) -> None:
    assert {found["state"] for found in examine().values()} == {"ok"}
    result = redraft("doctor")
    assert result.exit_code == 0
    assert "Valkey" in result.stdout


@pytest.mark.usefixtures("healthy")
def test_a_damaged_file_of_a_version_is_named(redraft: Run, examine: Examine, store: WeightsStore) -> None:
    (digest,) = store.digests()
    store.path(digest).write_bytes(b"weighty")
    found = examine()["stored weights"]
    assert found["state"] == "failed"
    assert "version 1 of chat (live)" in found["detail"]
    assert "rollback" in found["mend"]
    assert redraft("doctor").exit_code == 1


@pytest.mark.usefixtures("healthy")
def test_an_evicting_redis_is_named(examine: Examine, valkey: ValkeyServer) -> None:
    with admin(valkey.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        found = examine()["Redis"]
        client.config_set("maxmemory-policy", "noeviction")
    assert found["state"] == "failed"
    assert "allkeys-lru" in found["detail"]


@pytest.mark.usefixtures("healthy")
def test_without_redis_what_needs_it_is_not_looked_at(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_REDIS_URL", "redis://127.0.0.1:1/0")
    found = examine()
    assert {name: found[name]["state"] for name in ("Redis", "feedback", "clocks", "database")} == {
        "Redis": "failed",
        "feedback": "skipped",
        "clocks": "skipped",
        "database": "ok",
    }


@pytest.mark.usefixtures("healthy")
def test_a_database_that_is_not_migrated_is_told_apart(home: Path, examine: Examine) -> None:
    (home / "redraft.db").unlink()
    found = examine()
    assert found["database"]["state"] == "failed"
    assert "redraft migrate" in found["database"]["mend"]
    assert found["servers"]["state"] == "skipped"


@pytest.mark.usefixtures("healthy")
def test_a_changed_audit_row_is_found(examine: Examine, database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(text("UPDATE audit_log SET actor = 'somebody else'"))
    assert examine()["audit log"]["state"] == "failed"


def test_a_server_that_is_behind_is_named_with_its_error(examine: Examine, healthy: Servers) -> None:
    healthy.beat("host:2", "reference", "chat", generation=0, version=0, error="version 1: no memory")
    assert "host:2 serves version 0 (version 1: no memory)" in examine()["servers"]["detail"]


def test_a_part_of_the_worker_that_is_away_is_named(examine: Examine, healthy: Servers) -> None:
    healthy.gone("beat:host:1")
    found = examine()["worker"]
    assert (found["state"], found["detail"]) == ("failed", "no sign of life of beat")


@pytest.mark.usefixtures("healthy")
def test_another_target_than_the_drafters_is_found(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_TARGET", str(tmp_path / "nowhere"))
    assert examine()["target"]["state"] == "failed"
    monkeypatch.setenv("REDRAFT_TARGET", "smollm2")
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    found = examine()
    assert "not fetched yet" in found["target"]["detail"]
    assert found["drafter"]["state"] == "skipped"


@pytest.mark.usefixtures("healthy")
def test_a_misspelt_setting_is_found(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_STREAM_LENGHT", "5")
    assert "did you mean REDRAFT_STREAM_LENGTH?" in examine()["settings"]["detail"]


@pytest.mark.usefixtures("healthy")
def test_feedback_that_waits_is_counted(examine: Examine, valkey: ValkeyServer) -> None:
    with admin(valkey.url) as client:
        stream = FeedbackStream(client, "chat")
        stream.append([encode(make_record("a")), encode(make_record("b"))])
        (first, _) = stream.read(HISTORY, "test", 1).entries[0]
        stream.acknowledge(HISTORY, [first])
    detail = examine()["feedback"]["detail"]
    assert detail.startswith("2 records wait for training, 1 for the history; 0 in quarantine")
