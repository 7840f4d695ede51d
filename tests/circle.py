"""The parts of a whole redraft in one process, as the circle's tests need them: no HTTP, no Celery, all else real."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sqlalchemy import Engine as Database

from adapter.distil import DistilConfig
from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.learnt import LearntDrafter
from adapter.gate import GateConfig
from adapter.target import Target
from adapter.versions import Versions
from adapter.watch import WatchConfig
from cli.attachment import hold, take
from service.engine.engine import Engine, EngineConfig
from service.engine.floor import FloorConfig
from service.feedback import FeedbackWriter
from service.live import LiveConfig, LiveFollower
from service.origin import Origin
from service.recording import record_of
from storage.config import StorageConfig
from storage.decisions import Decision
from storage.jobs import Jobs
from storage.redis_clients import consume
from storage.registry import Drafter, Registry, Version
from storage.servers import Servers
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.service.engine.oracle import UNGOVERNED, Client, ask, plain_greedy, random_prompt
from tests.waiting import until
from worker.config import TriggerConfig
from worker.housekeeping import Housekeeper
from worker.pipeline import AdaptConfig, Stores, adapt_once

PROMPTS = 8
CONFIG = AdaptConfig(
    trigger=TriggerConfig(window_records=40, holdout_share=0.3, window_copies=PROMPTS * 6),
    distil=DistilConfig(epochs=8, batch_tokens=256, learning_rate=3e-3),
    gate=GateConfig(minimum_requests=4),
    watch=WatchConfig(holdback=0.0),  # every request is the live version's
)
LEARNING = replace(CONFIG, distil=replace(CONFIG.distil, epochs=24, learning_rate=1e-2))


@dataclass
class Circle:
    """Serving and learning around one database, one Redis and one weights store."""

    target: Target
    database: Database
    blobs: WeightsStore
    stream: FeedbackStream
    registry: Registry
    versions: Versions
    drafter: Drafter
    engine: Engine
    writer: FeedbackWriter
    housekeeper: Housekeeper
    config: AdaptConfig

    def send(self, prompts: Sequence[list[int]], max_tokens: int = 24, **options: object) -> list[Client]:
        """Serve greedy requests and wait until their feedback has been written."""
        written = self.writer.written
        clients = [ask(self.engine, prompt, max_tokens, workload="demo", **options) for prompt in prompts]
        for client in clients:
            client.wait(timeout=300)
        until(lambda: self.writer.written == written + len(prompts))
        return clients

    def stores(self, job_id: int) -> Stores:
        lease = Jobs(self.database).take(job_id, "test", lease_seconds=60)
        assert lease is not None
        registry = Registry(self.database, lease)
        return Stores(self.stream, Windows(self.database, self.blobs), registry, self.versions, lease)

    def adapt(self, stores: Stores) -> Decision | None:
        return adapt_once(self.drafter, stores, self.config, lambda: None)

    def check_learned(self, before: Sequence[Client]) -> None:
        """Version 2 goes live: the same prompts get the same texts, the target's own, and more of them is accepted."""
        until(lambda: self.engine.lanes.version() == 2)
        after = self.send([list(client.generation.prompt_ids) for client in before])
        assert [c.tokens for c in after] == [c.tokens for c in before]
        for client in after[:8]:
            assert client.tokens == plain_greedy(self.target, list(client.generation.prompt_ids), 24)
        accepted = [sum(r.accepted for c in clients for r in c.usage.rounds) for clients in (before, after)]
        assert accepted[1] > accepted[0]

    def check_taken_back(self) -> None:
        """An operator goes back to version 1, and nothing has failed so far."""
        self.registry.rollback("demo", None, "operator", "just to see")
        until(lambda: self.engine.lanes.version() == 1)
        assert self.engine.lanes.faults == 0


def tiny_prompts(target: Target, requests: int) -> list[list[int]]:
    """Few and repeated, so that a tiny drafter of a random target has something to learn."""
    return [random_prompt(target, n % PROMPTS, 6) for n in range(requests)]


def tiny_first(target: Target) -> CausalLM:
    """The target's first layer, with more than half of the vocabulary."""
    return CausalLM.from_target(target.model, 1, torch.arange(200))


def make_drafter(target: Target, database: Database, versions: Versions, first: LearntDrafter) -> Version:
    blob = versions.save(first)
    files, config = target.files, first.config.to_dict()
    return Registry(database).create_drafter(
        "demo", first.kind, files.fingerprint, files.tokenizer_fingerprint, config, blob.sha256, blob.size, "test"
    )


@contextmanager
def running_circle(
    target: Target,
    database: Database,
    url: str,
    folder: Path,
    first: LearntDrafter,
    config: AdaptConfig = CONFIG,
    floor: FloorConfig = FloorConfig(),
) -> Iterator[Circle]:
    """All parts, started and taken down in the order of `redraft serve`."""
    blobs = WeightsStore(folder / "weights")
    versions = Versions(blobs, target.files, target.embedding)
    make_drafter(target, database, versions, first)
    registry = Registry(database)
    drafter = registry.drafter("demo")
    origin = Origin(target.files.fingerprint, target.files.tokenizer_fingerprint, "demo")
    writer = FeedbackWriter(url, "demo")
    decoding = EngineConfig(context=min(512, target.context))
    engine = Engine(target, decoding, lambda finished: writer.put(record_of(finished, origin)), UNGOVERNED, floor)
    follower: LiveFollower[CausalLM] = LiveFollower(
        "demo",
        "server-1",
        "reference",
        registry,
        Servers(database),
        load=lambda version: versions.load(version, drafter),
        offer=lambda offered: take(engine, offered),
        redis_url=url,
        config=LiveConfig(live_poll_seconds=0.2),
        hold=lambda share: hold(engine, share),
        broken=lambda: engine.lanes.broken(),
    )
    storage = StorageConfig(home=folder, redis_url=url)
    redis = consume(url)
    housekeeper = Housekeeper(database, redis, storage, config.trigger)
    stream = FeedbackStream(redis, "demo")
    circle = Circle(target, database, blobs, stream, registry, versions, drafter, engine, writer, housekeeper, config)
    engine.start()
    follower.start()
    try:
        until(lambda: engine.lanes.version() == 1)
        yield circle
    finally:
        follower.close()
        engine.stop()
        writer.close()
        redis.close()
