"""The circle with routing, from top to bottom: a workload that the general drafter is poor at gets one of its own.

Everything is real but the size of the model: the server side with its lanes, Valkey, the database, windows,
distillation, the gate, and the trainer's routing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import Engine as Database

from adapter.distil import Lesson, distil
from adapter.drafters.learnt import LearntDrafter
from adapter.routing import RoutingConfig
from adapter.sample import answers
from adapter.target import Target
from adapter.versions import Versions
from cli.attachment import Attachment
from service.engine.engine import Engine, EngineConfig
from service.feedback import FeedbackConfig
from service.live import LiveConfig
from service.metrics import Metrics
from storage.config import StorageConfig
from storage.jobs import Jobs
from storage.records import decode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.routes import NOVEL, Routes
from storage.stream import ADAPT, FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.circle import CONFIG, make_drafter, tiny_first
from tests.service.engine.oracle import UNGOVERNED, ask, random_prompt
from tests.valkey_fixture import ValkeyServer
from tests.waiting import PATIENCE, until
from worker.collect import collect
from worker.config import TriggerConfig
from worker.pipeline import Stores, adapt_once
from worker.routing import Router

REQUESTS = 40
TOKENS = 20
LEARN = replace(CONFIG, trigger=TriggerConfig(window_records=REQUESTS, holdout_share=0.3, window_copies=REQUESTS))
ROUTING = RoutingConfig(routing="learned", routing_requests=REQUESTS)
OWN = "demo--novel"


@dataclass
class Site:
    """A server and the stores around it; `demo` is the general drafter."""

    target: Target
    database: Database
    storage: StorageConfig
    versions: Versions
    engine: Engine

    @property
    def blobs(self) -> WeightsStore:
        return WeightsStore(self.storage.weights_folder)

    def ask(self, workload: str) -> None:
        """Forty greedy requests, of eight prompts that no other workload has."""
        clients = [ask(self.engine, prompt, TOKENS, workload=workload) for prompt in prompts(self.target, workload) * 5]
        for client in clients:
            client.wait()

    def stores(self, drafter: str) -> Stores:
        jobs = Jobs(self.database)
        job = jobs.request("adapt", drafter)
        assert job is not None
        lease = jobs.take(job.id, "test", lease_seconds=60)
        assert lease is not None
        windows, registry = Windows(self.database, self.blobs), Registry(self.database, lease)
        return Stores(self.stream(drafter), windows, registry, self.versions, lease)

    def stream(self, drafter: str) -> FeedbackStream:
        return FeedbackStream(consume(self.storage.stream_url), drafter)


@pytest.fixture
def site(target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Site]:
    storage = StorageConfig(home=tmp_path, redis_url=valkey.url)
    versions = Versions(WeightsStore(storage.weights_folder), target.files, target.embedding)
    make_drafter(target, engine, versions, good_at_chat(target))
    live, feedback = LiveConfig(live_poll_seconds=0.1), FeedbackConfig()
    attached = Attachment("", "host:1", target, Registry(engine), storage, live, feedback, Metrics())
    decoding = Engine(target, EngineConfig(draft_length=4, slots=8, context=128), attached.finished, UNGOVERNED)
    decoding.start()
    try:
        attached.start(decoding)
        attached.wait(PATIENCE)
        yield Site(target, engine, storage, versions, decoding)
    finally:
        decoding.stop()
        attached.close()


def test_a_novel_workload_falls_back_to_the_general_drafter_then_gets_its_own(site: Site) -> None:
    routes, router = Routes(site.database), Router(site.database, site.blobs, site.versions, ROUTING)
    fingerprint = site.target.files.fingerprint

    # 1. Without a route, both workloads are the general drafter's, and so is their feedback.
    site.ask("chat")
    site.ask("novel")
    stores = site.stores("demo")
    for _ in range(2):
        until(lambda: stores.stream.waiting(ADAPT).count >= REQUESTS)
        general = stores.registry.drafter("demo")
        window = collect(stores.stream, stores.windows, general, site.versions.vocab_size, LEARN.trigger, stores.lease)
        assert window is not None
        stores.windows.close(window, "refused")

    # 2. The trainer sees that it is poor at one of them, and makes a drafter for that one.
    assert router.look(fingerprint) == 2
    (route,) = routes.of(fingerprint)
    assert (route.workload, route.drafter, route.cause) == ("novel", OWN, NOVEL)

    # 3. The server gives it a lane; what it proposes for teaches it alone.
    until(lambda: site.engine.lanes.version(OWN) == 1)
    site.ask("chat")
    site.ask("novel")
    until(lambda: site.stream(OWN).waiting(ADAPT).count == REQUESTS)
    until(lambda: stores.stream.waiting(ADAPT).count == REQUESTS)
    seen = [decode(data) for _, data in stores.stream.read(ADAPT, "test", 2 * REQUESTS).entries]
    assert {record.workload for record in seen} == {"chat"}

    # 4. It learns from that like any drafter, and the server follows its pointer.
    own = site.stores(OWN)
    decision = adapt_once(own.registry.drafter(OWN), own, LEARN, lambda: None)
    assert decision is not None
    assert decision.promote, decision.reason
    until(lambda: site.engine.lanes.version(OWN) == 2)
    assert site.engine.lanes.version("") == 1

    # 5. On the next requests it is the better one of the two, so the route stays.
    site.ask("novel")
    until(lambda: own.stream.waiting(ADAPT).count == REQUESTS)
    drafter = own.registry.drafter(OWN)
    window = collect(own.stream, own.windows, drafter, site.versions.vocab_size, LEARN.trigger, own.lease)
    assert window is not None
    own.windows.close(window, "refused")
    assert router.look(fingerprint) == 2  # the window that it was trained on, and this one
    (route,) = routes.of(fingerprint)
    assert route.drafter == OWN
    assert route.weights[OWN] > route.weights["demo"]


def prompts(target: Target, workload: str) -> list[list[int]]:
    first = {"chat": 0, "novel": 100}[workload]
    return [random_prompt(target, first + n, 6) for n in range(8)]


def good_at_chat(target: Target) -> LearntDrafter:
    """A drafter that has learnt the answers to one workload's prompts."""
    lesson = Lesson(list(answers(target, prompts(target, "chat"), TOKENS)) * 4)
    return distil(tiny_first(target), lesson, replace(CONFIG.distil, positions="verified")).student
