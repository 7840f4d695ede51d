"""A real vLLM server teaches: its rows against the target's own, its requests first, and an update that learns from it.

`make test-vllm` makes vLLM's environment; then `pytest tests/live/engine_teacher.py -s` in redraft's.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adapter.rescore import rescore
from adapter.target import TargetConfig, load
from cli.output import say
from storage.database import open_database
from storage.jobs import Jobs
from storage.records import FeedbackRecord
from storage.registry import Registry
from tests.live.vllm.rig import Prompt, Server, Stack, serving, stack, target_folder
from worker.engine_teacher import EngineTeacher, EngineTeacherConfig
from worker.learner import Learner

TEXTS = (
    "Name three rivers of Europe.", "What is the capital of Peru?", "Write one line of Python that adds two numbers.",
    "Why is the sky blue?", "Translate 'good morning' to French.", "List the primary colours.",
    "What does SELECT do in SQL?", "Give me a short poem about rain.",
)  # fmt: skip
TOP_K = 64  # asked for; vLLM gives 20 as it is started
VOCABULARY = 49_152  # of SmolLM2
QUICK = EngineTeacherConfig(teacher_tokens=1e6)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("teacher")) as made:
        yield made


@pytest.fixture(scope="module")
def vllm(beside: Stack) -> Iterator[Server]:
    with serving(beside, "vllm", speculate=True) as server:
        yield server


@pytest.fixture(scope="module")
def records(beside: Stack, vllm: Server) -> list[FeedbackRecord]:
    """What the proposer inside vLLM wrote of greedy and sampled requests: without any of the target's rows."""
    for n, text in enumerate(TEXTS):
        vllm.ask(Prompt("chat", text), temperature=0 if n % 2 == 0 else 0.7, max_tokens=32)
    until = time.monotonic() + 30
    while beside.written() < len(TEXTS) and time.monotonic() < until:
        time.sleep(0.2)
    found = beside.records()
    assert len(found) == len(TEXTS)
    assert all(len(record.teacher.positions) == 0 for record in found)
    return found


def taught(config: EngineTeacherConfig, url: str, records: list[FeedbackRecord]) -> list[FeedbackRecord]:
    return EngineTeacher(replace(config, teacher_url=url), TOP_K).read(records, VOCABULARY)


def test_its_rows_agree_with_the_targets_own(beside: Stack, vllm: Server, records: list[FeedbackRecord]) -> None:
    found = taught(QUICK, vllm.url, records)
    folder = target_folder(beside.environ)
    target = load(TargetConfig(str(folder), "bf16", "cpu", Path(beside.environ["REDRAFT_CACHE"])))
    again = {r.record.record_id: r.record for r in rescore(target, records, top_k=20)}
    same, apart, tails = [], [], []
    for record in found:
        positions, ids, log_probs, tail = record.teacher.arrays()
        wanted, their_ids, their_log_probs, their_tail = again[record.record_id].teacher.arrays()
        assert positions.tolist() == wanted.tolist() == list(range(1, len(record.output)))
        same += (ids[:, 0] == their_ids[:, 0]).tolist()
        apart += np.abs(np.exp(log_probs[:, 0]) - np.exp(their_log_probs[:, 0])).tolist()
        tails += np.abs(np.exp(tail) - np.exp(their_tail)).tolist()
    say(
        f"{len(same)} positions: the same likeliest token at {np.mean(same):.3f}, its probability apart by "
        f"{np.mean(apart):.4f} in the mean and {np.max(apart):.3f} at most, the mass outside by {np.mean(tails):.4f}"
    )
    assert np.mean(same) > 0.95
    assert np.mean(apart) < 0.02


def test_what_it_is_asked_is_no_traffic(beside: Stack, vllm: Server, records: list[FeedbackRecord]) -> None:
    taught(QUICK, vllm.url, records)
    time.sleep(2)
    others = [record for record in beside.records() if record.record_id not in {r.record_id for r in records}]
    assert all(not record.train and not record.rounds for record in others)


def test_it_is_not_asked_while_it_is_busy(vllm: Server, records: list[FeedbackRecord]) -> None:
    options = {"max_tokens": 400, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    asking = threading.Thread(target=lambda: vllm.ask(Prompt("long", "Tell me a long story."), **options))
    asking.start()
    time.sleep(1.5)
    began = time.monotonic()
    impatient = EngineTeacherConfig(teacher_tokens=1e6, teacher_patience=1.0)
    assert taught(impatient, vllm.url, records) == records, "it was busy for longer than the patience"
    assert asking.is_alive()
    found = taught(QUICK, vllm.url, records)
    assert not asking.is_alive(), "the request was over before anything was asked"
    asking.join()
    assert all(len(record.teacher.positions) for record in found)
    say(f"waited {time.monotonic() - began:.1f} s for a request to end, and then scored {len(found)} records")


def test_a_trainer_learns_from_what_it_says(beside: Stack, vllm: Server, records: list[FeedbackRecord]) -> None:
    database = open_database(beside.storage.sql_url)
    job = Jobs(database).request("adapt", "live")
    assert job is not None
    environ = {
        **beside.environ, "REDRAFT_TEACHER": "engine", "REDRAFT_TEACHER_URL": vllm.url, "REDRAFT_TEACHER_TOKENS": "1e6",
        "REDRAFT_WINDOW_RECORDS": "6", "REDRAFT_WINDOW_MINIMUM": "6", "REDRAFT_EPOCHS": "1",
    }  # fmt: skip
    Learner(environ).run(job.id)
    registry = Registry(database)
    run = registry.training(registry.version("live", 2))
    assert run is not None
    say(f"{run.records} records, {run.positions} positions, loss {run.first_loss:.3f} -> {run.last_loss:.3f}")
    assert run.teacher == "engine"
    assert run.positions > 0
    assert run.outcome == "trained"
