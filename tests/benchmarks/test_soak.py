"""The soak in its short form against a real HTTP server, and that it notices what it is there to notice."""

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from benchmarks import soak as soak_module
from benchmarks.clients import Ask, Client
from benchmarks.soak import SoakReport, SoakSettings, memory_of, soak, stuck_slots
from service.app import health_router
from service.engine.engine import Engine, EngineConfig
from tests.service.asking import MODEL, openai_app
from tests.service.engine.oracle import ask, first_layers
from tests.service.serving import running, slowed
from tests.tiny import TEXT
from tests.waiting import until

CONTEXT = 256


@pytest.fixture
def engine(target: Target) -> Iterator[Engine]:
    drafter: CausalLM = first_layers(target)
    engine = Engine(target, EngineConfig(draft_length=2, slots=4, context=CONTEXT), lambda generation: None)
    engine.start()
    engine.swap(1, drafter).result(timeout=20)
    yield engine
    engine.stop()


@pytest.fixture
def url(target: Target, engine: Engine) -> Iterator[str]:
    app = openai_app(target, engine)
    app.include_router(health_router(engine))
    with running(app) as address:
        yield address


def played(url: str, max_tokens: int = 12) -> SoakReport:
    """Sixteen clients for three seconds, on a server whose memory stands still."""
    return soak(SoakSettings(url, 16, 3.0, max_tokens), TEXT, lambda: 100.0, lambda line: None)


def test_sixteen_clients_of_which_one_is_slow_leave_nothing_behind(url: str, engine: Engine) -> None:
    report = played(url)
    assert report.shortfalls == ()
    assert report.failed == 0
    assert report.requests > 16
    assert report.tokens_per_second_without_slow > 0
    assert report.tokens_per_second_with_slow > 0
    assert engine.running == engine.waiting == 0
    assert json.loads(json.dumps(report.as_json()))["memory"]["grown"] == pytest.approx(0.0)


def test_failed_requests_are_counted_and_told(url: str) -> None:
    report = played(url, max_tokens=4 * CONTEXT)
    assert 0 < report.failed == report.requests
    assert "HTTP 400" in report.shortfalls[0]
    assert "context" in report.errors[0]


def test_a_server_that_is_not_there_is_a_failed_request_and_no_crash() -> None:
    sent = asyncio.run(Client("http://127.0.0.1:1", "tiny", lambda tokens: None).send(Ask("Hello", 4)))
    assert "Connect" in sent.error or "refused" in sent.error


def test_a_slot_that_stays_taken_is_noticed(
    url: str, engine: Engine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_module, "SETTLE_SECONDS", 0.0)
    with slowed(target):
        client = ask(engine, [5, 6, 7], 200)
        until(lambda: engine.running == 1)
        assert stuck_slots(url) == 1
    client.wait()
    until(lambda: engine.running == 0)
    assert stuck_slots(url) == 0


def test_a_slow_reader_gets_its_whole_answer_slowly(url: str) -> None:
    began = time.perf_counter()
    sent = asyncio.run(Client(url, MODEL, lambda tokens: None, pause=0.05).send(Ask("Hello, world!", 16)))
    assert sent.error == ""
    assert time.perf_counter() - began > 0.05 * 4


def test_tokens_are_counted_as_they_come(url: str) -> None:
    seen: list[int] = []
    sent = asyncio.run(Client(url, MODEL, seen.append).send(Ask("Hello, world!", 16)))
    assert sent.error == ""
    assert 0 < sent.tokens == sum(seen) <= 16


def test_memory_that_rises_after_warm_up_is_told_from_memory_that_is_flat() -> None:
    flat = [(t * 1.0, 500.0 + t % 3) for t in range(120)]
    filled = [(t * 1.0, 300.0 + min(10 * t, 200)) for t in range(120)]
    leaking = [(t * 1.0, 500.0 + t) for t in range(120)]
    assert [memory_of(samples).grows for samples in (flat, filled, leaking)] == [False, False, True]
    assert memory_of(leaking).slope_per_minute == pytest.approx(60.0)
    assert not memory_of(leaking[:25]).grows, "too short to judge"
