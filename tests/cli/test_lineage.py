"""Lineage at the command line: reproduce, purge, pin, and versions whose weights are gone."""

import json
import time
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine

from adapter.distil import DistilConfig
from adapter.drafters.causal_lm import CausalLM
from adapter.sample import answers, chat_prompt
from adapter.target import Target
from adapter.versions import Versions
from storage import marks, purge
from storage.database import transaction
from storage.records import encode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.stream import ADAPT, FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.adapter.feedback import served
from tests.circle import make_drafter as make_real_drafter
from tests.cli.conftest import Run
from tests.storage.rows import make_candidate, make_drafter, make_record
from tests.valkey_fixture import ValkeyServer
from worker.lineage import chosen, gathered, trained

YESTERDAY = time.time() - 86_400


@pytest.fixture
def trained_version(
    target: Target, target_dir: Path, database: Engine, store: WeightsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 of drafter `demo`, trained on a window, and the target that it was trained for."""
    monkeypatch.setenv("REDRAFT_TARGET", str(target_dir))
    monkeypatch.setenv("REDRAFT_CACHE", str(target_dir / "cache"))
    monkeypatch.setenv("REDRAFT_TRAINER_NICE", "0")
    versions, windows = Versions(store, target.files, target.embedding), Windows(database, store)
    drafter = CausalLM.from_target(target.model, 1, torch.arange(200))
    parent = make_real_drafter(target, database, versions, drafter)
    prompts = [chat_prompt(target, f"hello {n}") for n in range(4)]
    records = tuple(served(drafter, r) for r in answers(target, prompts, max_tokens=12, top_k=8))
    window = windows.keep("demo", records, ())
    assert window is not None
    windows.close(window, "promoted")
    registry, config = Registry(database), DistilConfig(epochs=1)
    names = chosen(parent, window, windows, registry, config)
    made = trained(gathered(names, registry.drafter("demo"), parent, windows, versions), config)
    blob = versions.save(made.student)
    registry.add_candidate(parent, blob.sha256, blob.size, window.id, made.report)


@pytest.mark.usefixtures("trained_version")
def test_reproduce_says_identical_and_exits_0(redraft: Run, registry: Registry) -> None:
    result = redraft("reproduce", "2")
    digest = registry.version("demo", 2).weights_sha256
    assert (result.exit_code, result.stdout) == (0, f"version 2 of demo: identical, sha256 {digest}\n")


@pytest.mark.usefixtures("trained_version")
def test_reproduce_says_why_not_and_exits_1(redraft: Run, database: Engine, store: WeightsStore) -> None:
    purge.finish(database, store, [], purge.begin(database, "default", False, "tester"))
    result = redraft("reproduce", "2", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"]) == (1, "impossible")
    assert "purged" in found["differences"][0]
    said = redraft("reproduce", "1").stdout
    assert "version 1 of demo cannot be reproduced" in said
    assert "`redraft init`" in said


@pytest.fixture
def exposed(registry: Registry, store: WeightsStore, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions 2 and 3 replaced 1; 3 learnt from tenant acme, of whom a record waits on the stream."""
    monkeypatch.setenv("REDRAFT_REDIS_URL", valkey.url)
    with consume(valkey.url) as client:
        client.flushall()
        record = make_record("waiting", finished_at=YESTERDAY)
        FeedbackStream(client, "chat").append([encode(record)])
    live = make_drafter(registry)
    for name, tenant in (("a", "other"), ("b", "acme")):
        newer = make_candidate(registry, store, live, name, tenant)
        registry.promote(newer, live, "test", "better")
        live = newer


@pytest.mark.usefixtures("exposed")
def test_purge_deletes_and_says_what_to_go_back_to(redraft: Run, registry: Registry, valkey: ValkeyServer) -> None:
    said = redraft("purge", "--tenant", "acme", "--yes").stdout
    assert "1 training and 0 holdout records deleted from 1 windows, 1 from the streams and the quarantine" in said
    assert "trained on 1 of the records" in said
    assert "version 3 of chat is live and learnt from them: `redraft rollback --to 2 --drafter chat`" in said
    assert registry.live("chat").number == 3
    with consume(valkey.url) as client:
        assert FeedbackStream(client, "chat").waiting(ADAPT).count == 0


@pytest.mark.usefixtures("exposed")
def test_purge_with_retire_rolls_back_by_itself(redraft: Run, registry: Registry) -> None:
    done = json.loads(redraft("purge", "--tenant", "acme", "--retire", "--yes", "--json").stdout)
    assert done["purge"]["counts"]["rolled_back"] == ["chat: 3 -> 2"]
    assert [v["number"] for v in done["versions"]] == [3]
    assert registry.live("chat").number == 2
    result = redraft("promote", "3", "--reason", "try")
    assert (result.exit_code, "was withdrawn" in result.stderr) == (1, True)
    assert "withdrawn" in redraft("versions").stdout


@pytest.mark.usefixtures("exposed")
def test_purge_asks_first(redraft: Run, database: Engine) -> None:
    result = redraft("purge", "--tenant", "acme")
    assert (result.exit_code, "add --yes" in result.stderr) == (1, True)
    assert purge.found(database, "acme").training == 1
    assert purge.unfinished(database) == []


@pytest.mark.usefixtures("exposed")
def test_purge_without_redis_is_unfinished_and_the_doctor_says_so(
    redraft: Run, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_REDIS_URL", "redis://127.0.0.1:1/0")
    result = redraft("purge", "--tenant", "acme", "--yes")
    assert (result.exit_code, "the stream is not" in result.stderr) == (1, True)
    assert _purges(redraft)["state"] == "failed"
    monkeypatch.setenv("REDRAFT_REDIS_URL", valkey.url)
    assert redraft("purge", "--tenant", "acme", "--yes").exit_code == 0
    assert _purges(redraft)["state"] == "ok"


@pytest.mark.usefixtures("exposed")
def test_versions_whose_weights_are_deleted_and_pinned_ones_are_marked(
    redraft: Run, registry: Registry, database: Engine
) -> None:
    with transaction(database) as session:
        marks.put(session, registry.version("chat", 1).id, marks.WEIGHTS_DELETED, "test", "for a test")
    assert redraft("pin", "2").exit_code == 0
    said = redraft("versions").stdout
    assert "retired, weights deleted" in said
    assert "retired, previous, pinned" in said
    listed = {v["number"]: v for v in json.loads(redraft("versions", "--json").stdout)}
    assert (listed[1]["weights_deleted"], listed[2]["pinned"]) == (True, True)
    assert "deleted" in redraft("show", "1").stdout
    result = redraft("rollback", "--to", "1", "--reason", "try")
    assert (result.exit_code, "`redraft reproduce 1 --restore`" in result.stderr) == (1, True)
    assert redraft("pin", "2", "--off").exit_code == 0
    assert "pinned" not in redraft("versions").stdout


def _purges(redraft: Run) -> dict[str, str]:
    findings = json.loads(redraft("doctor", "--json").stdout)
    return next(f for f in findings if f["name"] == "purges")  # type: ignore[no-any-return]
