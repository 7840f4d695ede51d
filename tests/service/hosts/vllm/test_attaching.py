"""The proposer's side of redraft: found late, followed to and fro, and its feedback fit for the worker."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy

import pytest
import torch
from sqlalchemy import Engine as Database

from adapter.target import Target
from adapter.versions import Versions
from service.hosts import lossy
from service.hosts.lossy import Guard
from service.hosts.vllm.attaching import Attachment, Engine, HostConfig
from service.hosts.vllm.core import Core
from service.hosts.vllm.drafting import Bounds
from service.hosts.vllm.proposer import record
from service.hosts.vllm.requests import Request
from storage.database import open_database
from storage.records import FeedbackRecord, decode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.servers import Servers
from storage.validation import validate
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.service.engine.oracle import first_layers
from tests.service.hosts.vllm import engine as vllm
from tests.service.hosts.vllm.engine import Asked, said_by
from tests.storage.rows import make_record, make_training
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until

K, CONTEXT = 3, 120


class Host:
    """A core that is attached, as `Proposer` puts it together."""

    def __init__(self, target_dir: Path, **speculative: object) -> None:
        self.core = Core(Bounds(4, CONTEXT, K, 10_000, 2**28), self._finished)
        self.guard = Guard(seen=lossy.vllm(speculative))
        config = HostConfig(cache=target_dir / "cache")
        self.attachment = Attachment(
            config,
            Engine(
                str(target_dir), torch.float32, torch.device("cpu"), "0.32.0", self.guard, self.core.take,
                self.core.hold, self.core.broken,
            ),
        )  # fmt: skip

    def _finished(self, request: Request) -> None:
        attached = self.attachment.attached
        if attached is not None:
            attached.writer.put(record(request, attached.origin, self.guard.lossless))


@pytest.fixture
def database(sqlite_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, valkey: ValkeyServer) -> Database:
    copy(sqlite_template, tmp_path / "redraft.db")
    for name, value in (
        ("HOME", str(tmp_path)), ("REDIS_URL", valkey.url), ("LIVE_POLL_SECONDS", "0.1"), ("DRAFTER", ""),
    ):  # fmt: skip
        monkeypatch.setenv(f"REDRAFT_{name}", value)
    return open_database(f"sqlite:///{tmp_path / 'redraft.db'}")


@contextmanager
def attached(host: Host) -> Iterator[Attachment]:
    host.attachment.start()
    try:
        yield host.attachment
    finally:
        host.attachment.close()


def make(
    target: Target, database: Database, folder: Path, kind: str = "causal_lm", name: str = "vllm-test"
) -> Registry:
    drafter, registry = first_layers(target, layers=1, vocabulary=200, seed=1), Registry(database)
    blob = Versions(WeightsStore(folder / "weights"), target.files, target.embedding).save(drafter)
    registry.create_drafter(
        name, kind, target.files.fingerprint, target.files.tokenizer_fingerprint, drafter.config.to_dict(),
        blob.sha256, blob.size, "test",
    )  # fmt: skip
    return registry


def serving(database: Database) -> Callable[[], list[tuple[str, int, str]]]:
    return lambda: [(s.host_kind, s.version, s.error) for s in Servers(database).live("vllm-test")]


def stream(url: str, name: str = "vllm-test") -> list[FeedbackRecord]:
    redis = consume(url)
    try:
        return [decode(next(iter(fields.values()))) for _, fields in redis.xrange(f"redraft:{name}:feedback")]  # type: ignore[union-attr]
    finally:
        redis.close()


def test_a_drafter_that_is_made_later_is_found_served_and_learnt_from(
    target: Target, target_dir: Path, database: Database, tmp_path: Path, valkey: ValkeyServer
) -> None:
    host = Host(target_dir)
    with attached(host):
        make(target, database, tmp_path)
        until(lambda: host.core.version == 1)
        drafter = first_layers(target, layers=1, vocabulary=200, seed=1)
        engine = vllm.Engine(rows=2, context=CONTEXT)
        asked = [engine.submit(_asked(drafter, n)) for n in range(3)]
        engine.run(host.core.begins, host.core.step)
        until(lambda: len(stream(valkey.url)) == 3)
        until(lambda: serving(database)() == [("vllm", 1, "")])
        (server,) = Servers(database).live("vllm-test")
        assert server.capabilities is not None
        assert (server.capabilities.engine, server.capabilities.losslessness) == ("vllm 0.32.0", "lossless")
    for found, a in zip(sorted(stream(valkey.url), key=lambda r: r.request_id), asked, strict=True):
        validate(found, target.vocab_size)
        assert (found.source, found.drafter, found.request_id) == ("vllm", "vllm-test", a.id)
        assert found.lossless
        assert found.output.tolist() == a.output
        assert len(found.rounds) == len(a.rounds)
        assert found.teacher.positions == b""
    assert Servers(database).live("vllm-test") == []  # signed off


def test_a_promotion_and_a_rollback_are_followed(
    target: Target, target_dir: Path, database: Database, tmp_path: Path
) -> None:
    host, registry = Host(target_dir), make(target, database, tmp_path)
    with attached(host):
        until(lambda: host.core.version == 1)
        first = registry.live("vllm-test")
        other = first_layers(target, layers=1, vocabulary=200, seed=9)
        blob = Versions(WeightsStore(tmp_path / "weights"), target.files, target.embedding).save(other)
        windows = Windows(database, WeightsStore(tmp_path / "weights"))
        window = windows.keep("vllm-test", (make_record("r"),), ())
        assert window is not None
        windows.close(window, "promoted")
        second = registry.add_candidate(first, blob.sha256, blob.size, window.id, make_training())
        registry.promote(second, first, "test", "better")
        until(lambda: host.core.version == 2)
        until(lambda: serving(database)() == [("vllm", 2, "")])
        registry.rollback("vllm-test", None, "test", "worse")
        until(lambda: host.core.version == 1)


def test_a_kind_that_reads_hidden_states_is_not_served(
    target: Target, target_dir: Path, database: Database, tmp_path: Path
) -> None:
    make(target, database, tmp_path, kind="medusa")
    host = Host(target_dir)
    with attached(host) as attachment:
        until(lambda: bool(attachment.looking.told))
        assert "cannot serve a medusa drafter" in attachment.looking.told
        assert host.core.version == 0


def test_records_of_a_lossy_vllm_say_so(
    target: Target, target_dir: Path, database: Database, tmp_path: Path, valkey: ValkeyServer
) -> None:
    make(target, database, tmp_path, name="lossy-test")
    host = Host(target_dir, rejection_sample_method="fly")
    with attached(host):
        until(lambda: host.core.version == 1)
        engine = vllm.Engine(rows=2, context=CONTEXT)
        engine.submit(_asked(first_layers(target, layers=1, vocabulary=200, seed=1), 0))
        engine.run(host.core.begins, host.core.step)
    (found,) = stream(valkey.url, "lossy-test")
    assert not found.lossless


def _asked(drafter: object, number: int) -> Asked:
    prompt = [number + 2, 5, 9, 14]
    return Asked(f"r{number}", prompt, said_by(drafter, prompt, 20 + K + 1, seed=number), 20)  # type: ignore[arg-type]
