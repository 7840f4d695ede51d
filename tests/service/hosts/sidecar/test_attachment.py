"""The drafter's side: what turns up is attached, what is away fails no request."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import Engine, create_engine

from service.engine.floor import FloorConfig
from service.feedback import FeedbackConfig
from service.hosts.lossy import Guard, LossyConfig
from service.hosts.sidecar.app import Sidecar
from service.hosts.sidecar.attachment import Attachment
from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.engine_client import EngineClient
from service.hosts.sidecar.following import Fixed, MadeReady, Surroundings
from service.hosts.sidecar.observing import Observer
from service.hosts.sidecar.own import Own
from service.hosts.sidecar.scraper import Scraper
from service.hosts.sidecar.upstream import Upstream
from service.hosts.swapping import SwapFailed
from service.live import LiveConfig
from storage.config import StorageConfig
from storage.database import open_database
from storage.records import FeedbackRecord, Round, decode
from storage.registry import Registry, Version
from storage.servers import Servers
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from tests.service.hosts.sidecar.rig import recorded_vllm, served
from tests.service.serving import call
from tests.storage.rows import make_candidate, make_record
from tests.waiting import until

ASKED = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}


def _fixed(drafter: object) -> Any:
    fixed = Fixed()
    return fixed.load, fixed.swap


@contextmanager
def standing(
    engine: str, database: Engine, redis_url: str, home: Path, ready: MadeReady = _fixed
) -> Iterator[tuple[str, Attachment, Observer]]:
    """The whole sidecar as the command builds it."""
    config = SidecarConfig(sidecar_share=1.0)
    upstream = Upstream(engine)
    client = EngineClient(lambda: upstream.url)
    storage, live = StorageConfig(home=home, redis_url=redis_url), LiveConfig(live_poll_seconds=0.05)
    around = Surroundings("d", "host:1", Registry(database), storage, live, FeedbackConfig(), FloorConfig())
    attachment = Attachment(around, config, client, ready, Guard(LossyConfig("yes")))
    observer = Observer(config, lambda: attachment.findings, attachment.served, attachment.keep, attachment.ask_again)
    scraper = Scraper(client, 0.0, lambda: attachment.served()[0])
    attachment.start(scraper)
    with served(Sidecar(upstream, observer, Own(upstream, observer, attachment, scraper))) as address:
        yield address, attachment, observer
    observer.close()
    attachment.close()
    client.close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """The address of an engine that gives a real vLLM's answers."""
    with served(recorded_vllm) as address:
        yield address


@pytest.fixture
def engine(sqlite_template: Path, tmp_path: Path) -> Iterator[Engine]:
    """A migrated database."""
    shutil.copy(sqlite_template, tmp_path / "redraft.db")
    opened = open_database(f"sqlite:///{tmp_path / 'redraft.db'}")
    yield opened
    opened.dispose()


@pytest.fixture
def drafter(engine: Engine) -> Version:
    return Registry(engine).create_drafter("d", "causal_lm", "t" * 64, "k" * 64, {}, "w" * 64, 1, "test")


def _written(redis_url: str, count: int) -> list[FeedbackRecord]:
    stream = FeedbackStream(Redis.from_url(redis_url), "d", 100, 1.0)
    until(lambda: stream.waiting("adapt").count >= count)
    return [decode(data) for _, data in stream.read("adapt", "test", 100).entries]


def test_an_observed_answer_becomes_a_record_of_the_drafter_s_stream(
    vllm: str, engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path
) -> None:
    headers = {"X-Redraft-Workload": "sql", "X-Redraft-Tenant": "acme"}
    with standing(vllm, engine, valkey_url, tmp_path) as (address, attachment, _):
        until(lambda: attachment.findings is not None and attachment.served()[0] is not None)
        status, answer = call(address, "POST", "/v1/completions", ASKED, headers)
        (record,) = _written(valkey_url, 1)
        until(lambda: bool(Servers(engine).live("d")))
        (server,) = Servers(engine).live("d")
        told = json.loads(call(address, "GET", "/redraft/capabilities")[1])
        health = json.loads(call(address, "GET", "/redraft/health")[1])
        page = call(address, "GET", "/redraft/metrics")[1].decode()
    figures = json.loads(answer)["metrics"]["speculative_decoding"]
    assert status == 200
    assert (record.source, record.drafter, record.workload, record.tenant) == ("sidecar", "d", "sql", "acme")
    assert (record.target_fingerprint, record.lossless) == ("t" * 64, True)
    assert [r.accepted for r in record.rounds] == figures["per_step_accepted"]
    assert record.positions == "exact"
    assert len(record.teacher.arrays()[0]) == sum(r.accepted < r.proposed for r in record.rounds)
    assert {r.version for r in record.rounds} == {1}
    assert (server.version, server.capabilities.rounds) == (1, "reconstructed")
    assert told["host"]["teacher"] == "top_k"
    assert (health["drafter"], health["version"], health["observing"]) == ("d", 1, True)
    assert 'redraft_sidecar_observed_total{outcome="recorded"} 1.0' in page


def test_requests_pass_while_redis_the_database_and_the_drafter_are_away(vllm: str, tmp_path: Path) -> None:
    nowhere = create_engine("postgresql+psycopg://u:p@127.0.0.1:9/none", connect_args={"connect_timeout": 1})
    direct = json.loads(call(vllm, "POST", "/v1/completions", ASKED)[1])
    with standing(vllm, nowhere, "redis://127.0.0.1:9/0", tmp_path) as (address, attachment, observer):
        until(lambda: attachment.findings is not None)
        status, answer = call(address, "POST", "/v1/completions", ASKED)
        until(lambda: observer.counts.get("no_drafter") == 1)
    assert status == 200
    assert json.loads(answer)["choices"] == direct["choices"]


def test_requests_pass_while_only_redis_is_away(vllm: str, engine: Engine, drafter: Version, tmp_path: Path) -> None:
    with standing(vllm, engine, "redis://127.0.0.1:9/0", tmp_path) as (address, attachment, observer):
        until(lambda: attachment.findings is not None and attachment.served()[0] is not None)
        began = time.monotonic()
        for _ in range(3):
            assert call(address, "POST", "/v1/completions", ASKED)[0] == 200
        assert time.monotonic() - began < 30
        until(lambda: observer.counts.get("recorded") == 3)
        assert attachment.writer is not None
        assert attachment.writer.written == 0


def test_an_engine_that_comes_later_is_found(engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path) -> None:
    with standing("http://127.0.0.1:9", engine, valkey_url, tmp_path) as (address, attachment, _):
        assert call(address, "GET", "/v1/models")[0] == 502
        assert call(address, "GET", "/redraft/health")[0] == 200
        assert call(address, "GET", "/redraft/capabilities")[0] == 503
        assert attachment.findings is None


def _next_version(engine: Engine, live: Version, folder: Path) -> None:
    registry = Registry(engine)
    candidate = make_candidate(registry, WeightsStore(folder / "weights"), live, "w")
    registry.promote(candidate, expecting=live, actor="test", reason="test")


def test_a_swapper_is_given_each_live_version_and_records_name_it(
    vllm: str, engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path
) -> None:
    taken: list[tuple[int, Path]] = []

    def ready(drafter: object) -> Any:
        return (lambda version: tmp_path / str(version.number)), (
            lambda version, checkpoint: taken.append((version.number, checkpoint))
        )

    with standing(vllm, engine, valkey_url, tmp_path, ready) as (address, attachment, _):
        until(lambda: attachment.served()[0] == 1 and attachment.findings is not None)
        call(address, "POST", "/v1/completions", ASKED)
        _next_version(engine, drafter, tmp_path)
        until(lambda: attachment.served()[0] == 2)
        call(address, "POST", "/v1/completions", ASKED)
        records = _written(valkey_url, 2)
    assert taken == [(1, tmp_path / "1"), (2, tmp_path / "2")]
    assert sorted({r.version for record in records for r in record.rounds}) == [1, 2]


def _noting(taken: list[int], folder: Path) -> MadeReady:
    """Swaps that only note the version's number."""
    return lambda drafter: ((lambda version: folder), (lambda version, checkpoint: taken.append(version.number)))


def test_an_engine_that_was_started_again_is_given_its_version_again(
    vllm: str, engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path
) -> None:
    taken: list[int] = []
    with standing(vllm, engine, valkey_url, tmp_path, _noting(taken, tmp_path)) as (_, attachment, _):
        until(lambda: attachment.served()[0] == 1 and attachment.findings is not None)
        attachment.engine_restarted()
        assert attachment.served()[0] is None
        until(lambda: attachment.served()[0] == 1 and attachment.findings is not None)
    assert taken == [1, 1]


def test_without_a_swapper_a_new_version_is_refused_with_what_to_do(
    vllm: str, engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path
) -> None:
    with standing(vllm, engine, valkey_url, tmp_path) as (_, attachment, _):
        until(lambda: attachment.served()[0] == 1)
        _next_version(engine, drafter, tmp_path)
        until(lambda: attachment.following is not None and "redraft export" in attachment.following.follower.error)
        assert attachment.served()[0] == 1


def test_a_fixed_engine_is_taken_to_serve_the_first_version(drafter: Version) -> None:
    fixed = Fixed()
    fixed.swap(drafter, Path())
    fixed.swap(drafter, Path())
    with pytest.raises(SwapFailed, match="takes its engine to serve version 1"):
        fixed.swap(Version(99, "d", 2, 1, "v" * 64, 1, drafter.created_at, None), Path())


def test_a_new_version_far_below_the_one_before_is_taken_back_by_itself(
    vllm: str, engine: Engine, drafter: Version, valkey_url: str, tmp_path: Path
) -> None:
    taken: list[int] = []
    with standing(vllm, engine, valkey_url, tmp_path, _noting(taken, tmp_path)) as (_, attachment, _):
        until(lambda: attachment.served()[0] == 1 and attachment.findings is not None)
        _show(attachment, version=1, accepted=3)
        _next_version(engine, drafter, tmp_path)
        until(lambda: attachment.served()[0] == 2)
        _show(attachment, version=2, accepted=0)
        until(lambda: attachment.served()[0] == 1)
    assert taken == [1, 2, 1]
    assert Registry(engine).pointer("d").live.number == 1


def _show(attachment: Attachment, version: int, accepted: int) -> None:
    """Observed requests of so many rounds that accepted so much."""
    assert attachment.following is not None
    for number in range(8):
        rounds = tuple(Round(1 + 4 * i, version, 3, accepted, -1, 0.0, 0.0, 0.0) for i in range(8))
        attachment.following.judge(make_record(f"r{version}-{number}", rounds, tokens=40))
