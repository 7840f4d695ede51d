"""Drift in plainly decoded requests: replayed with the live drafter, a sample at a time."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from sqlalchemy import Engine

from adapter.drift import DriftConfig
from adapter.sample import answers
from adapter.target import Target
from adapter.versions import Versions
from storage.config import StorageConfig
from storage.database import open_database
from storage.drift import FALL, DriftStore
from storage.records import FeedbackRecord, Round, encode, int32
from storage.redis_clients import consume
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from tests.circle import make_drafter, tiny_first
from tests.service.engine.oracle import random_prompt
from tests.valkey_fixture import ValkeyServer
from tests.worker.environment import trainer_environ
from worker.agreement import PLAIN, REQUESTS, Agreement
from worker.learner import Learner


@pytest.fixture
def texts(target: Target) -> list[FeedbackRecord]:
    """What the target says plainly to a few prompts."""
    prompts = [random_prompt(target, n, 6) for n in range(8)]
    return [msgspec.structs.replace(a, drafter="demo", workload="demo") for a in answers(target, prompts, 20)]


@pytest.fixture
def stream(valkey: ValkeyServer) -> Iterator[FeedbackStream]:
    with consume(valkey.url) as redis:
        yield FeedbackStream(redis, "demo")


@pytest.fixture
def agreement(target: Target, engine: Engine, stream: FeedbackStream, tmp_path: Path) -> Agreement:
    versions = Versions(WeightsStore(tmp_path / "weights"), target.files, target.embedding)
    make_drafter(target, engine, versions, tiny_first(target))
    return Agreement(engine, stream.client, versions, StorageConfig(home=tmp_path), DriftConfig())


def test_plain_requests_are_replayed_once_with_the_live_drafter(
    agreement: Agreement, target: Target, stream: FeedbackStream, texts: list[FeedbackRecord], engine: Engine
) -> None:
    _send(stream, texts)
    assert agreement.look(target.files.fingerprint) == 8
    assert agreement.look(target.files.fingerprint) == 0
    (view,) = DriftStore(engine).series("demo")
    assert (view.workload, view.policy, view.version, view.requests) == ("demo", PLAIN, 1, 8)


def test_of_much_traffic_the_newest_are_a_sample(
    agreement: Agreement, target: Target, stream: FeedbackStream, texts: list[FeedbackRecord]
) -> None:
    _send(stream, [msgspec.structs.replace(texts[n % 8], record_id=f"r{n}") for n in range(3 * REQUESTS)])
    assert agreement.look(target.files.fingerprint) == REQUESTS
    assert agreement.look(target.files.fingerprint) == 0


def test_requests_with_rounds_and_unsound_ones_are_passed_over(
    agreement: Agreement, target: Target, stream: FeedbackStream, texts: list[FeedbackRecord]
) -> None:
    played = msgspec.structs.replace(texts[0], rounds=(Round(1, 1, 2, 2, -1, 0.0, 1.0, 1.0),))
    hot = msgspec.structs.replace(texts[1], temperature=0.7)
    broken = msgspec.structs.replace(texts[2], prompt_ids=int32([10**6]))
    stream.append([b"rubbish"])
    _send(stream, [played, hot, broken])
    assert agreement.look(target.files.fingerprint) == 0


def test_another_targets_drafters_are_left_alone(
    agreement: Agreement, stream: FeedbackStream, texts: list[FeedbackRecord]
) -> None:
    _send(stream, texts)
    assert agreement.look("another target") == 0


def test_text_that_the_drafter_does_not_foresee_is_a_fall(
    agreement: Agreement, target: Target, stream: FeedbackStream, texts: list[FeedbackRecord], engine: Engine
) -> None:
    """Before: text in the drafter's own words. Then: text that it never says."""
    own = [_in_the_words_of(target, text, agreed=True) for text in texts]
    foreign = [_in_the_words_of(target, text, agreed=False) for text in texts]
    for n in range(4):
        _send(stream, [msgspec.structs.replace(r, record_id=f"own{n}{r.record_id}") for r in own])
        agreement.look(target.files.fingerprint)
    assert DriftStore(engine).alarms("demo", limit=1)[0].finding.kind == "novel"
    _send(stream, [msgspec.structs.replace(r, record_id=f"foreign{r.record_id}") for r in foreign])
    agreement.look(target.files.fingerprint)
    fall = DriftStore(engine).alarms("demo", limit=1)[0].finding
    assert (fall.kind, fall.policy) == (FALL, PLAIN)
    assert fall.before == pytest.approx(1.0)
    assert fall.after == pytest.approx(0.0)


def test_the_trainer_replays_when_it_is_rung_for(
    agreement: Agreement,
    target: Target,
    target_dir: Path,
    stream: FeedbackStream,
    texts: list[FeedbackRecord],
    database_url: str,
    valkey: ValkeyServer,
    tmp_path: Path,
) -> None:
    _send(stream, texts)
    environ = {
        **trainer_environ(tmp_path, database_url, valkey, target_dir),
        "REDRAFT_DTYPE": "fp32",
        "REDRAFT_DEVICE": "cpu",
    }
    Learner(environ).replay_plain()
    store = DriftStore(open_database(database_url))
    assert [(view.policy, view.requests) for view in store.series("demo")] == [(PLAIN, 8)]


@torch.inference_mode()
def _in_the_words_of(target: Target, text: FeedbackRecord, agreed: bool) -> FeedbackRecord:
    """The record with an output that the drafter chooses token by token, or with its least likely tokens."""
    drafter, tokens = tiny_first(target), text.prompt.tolist()
    for _ in range(20):
        logits = drafter.logits(drafter.hidden(torch.tensor([tokens]))[0, -1:])[0]
        tokens.append(int(drafter.draft_to_target[logits.argmax() if agreed else logits.argmin()]))
    empty = msgspec.structs.replace(text.teacher, positions=b"", ids=b"", log_probs=b"", tail_log_mass=b"")
    return msgspec.structs.replace(text, output_ids=int32(tokens[-20:]), teacher=empty)


def _send(stream: FeedbackStream, records: list[FeedbackRecord]) -> None:
    assert stream.append([encode(record) for record in records]) == []
