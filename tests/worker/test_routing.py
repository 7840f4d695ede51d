"""Learned routing, end to end but for serving: two tiny drafters, workloads in the words of each, real windows."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from redis import Redis
from sqlalchemy import Engine, text

from adapter.drafters.causal_lm import CausalLM
from adapter.routing import RoutingConfig
from adapter.sample import answers
from adapter.target import Target
from adapter.versions import Versions
from storage.decisions import Decision
from storage.jobs import Jobs
from storage.records import FeedbackRecord, encode, int32
from storage.registry import Registry
from storage.routes import LEARNED, MANUAL, NOVEL, Routes
from storage.standings import Standings
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.circle import CONFIG, tiny_first
from tests.service.engine.oracle import random_prompt
from tests.storage.rows import make_training
from worker.learner import Learner
from worker.pipeline import Stores, adapt_once
from worker.routing import Router

REQUESTS = 40
TOKENS = 16
LEARN = RoutingConfig(routing="learned", routing_requests=REQUESTS, routing_share=0.05)


class Rig:
    """A target with its drafters, and windows of what they were asked."""

    def __init__(self, target: Target, engine: Engine, folder: Path) -> None:
        self.target, self.engine, self.fingerprint = target, engine, target.files.fingerprint
        self.blobs = WeightsStore(folder / "weights")
        self.versions = Versions(self.blobs, target.files, target.embedding)
        self.windows, self.registry = Windows(engine, self.blobs), Registry(engine)
        self.routes, self.standings = Routes(engine), Standings(engine)
        self.asked = 0

    def add(self, name: str, drafter: CausalLM) -> None:
        blob, files = self.versions.save(drafter), self.target.files
        self.registry.create_drafter(
            name, "causal_lm", files.fingerprint, files.tokenizer_fingerprint, drafter.config.to_dict(),
            blob.sha256, blob.size, "test",
        )  # fmt: skip

    def window(self, drafter: str, records: list[FeedbackRecord]) -> Window:
        """A decided window of the drafter, of new requests like these."""
        fresh = tuple(self._asked_again(record, drafter) for record in records)
        window = self.windows.keep(drafter, fresh[1:], fresh[:1])
        assert window is not None
        self.windows.close(window, "refused")
        return window

    def router(self, config: RoutingConfig = LEARN, general: str = "general") -> Router:
        return Router(self.engine, self.blobs, self.versions, config, general)

    def look(self, config: RoutingConfig = LEARN) -> int:
        """Until there is no window left; how many there were."""
        router, total = self.router(config), 0
        while scored := router.look(self.fingerprint):
            total += scored
        return total

    def routed(self) -> dict[str, tuple[str, str]]:
        return {route.workload: (route.drafter, route.cause) for route in self.routes.of(self.fingerprint)}

    def _asked_again(self, record: FeedbackRecord, drafter: str) -> FeedbackRecord:
        self.asked += 1
        return msgspec.structs.replace(
            record, record_id=f"r{self.asked}", request_id=f"q{self.asked}", drafter=drafter,
            finished_at=float(self.asked),
        )  # fmt: skip


@pytest.fixture
def rig(target: Target, engine: Engine, tmp_path: Path) -> Rig:
    rig = Rig(target, engine, tmp_path)
    rig.add("general", tiny_first(target))
    return rig


@pytest.fixture(scope="session")
def specialist(target: Target) -> CausalLM:
    """A drafter that would say something else than `tiny_first`."""
    made = tiny_first(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        own = {
            name: tensor + 0.3 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in made.own_tensors().items()
        }
    made.load_own(own)
    return made


@pytest.fixture(scope="session")
def chat(target: Target) -> list[FeedbackRecord]:
    """Requests whose answers are the general drafter's own words."""
    return said_by(tiny_first(target), target, "chat")


@pytest.fixture(scope="session")
def sql(target: Target, specialist: CausalLM) -> list[FeedbackRecord]:
    """Requests whose answers are the specialist's."""
    return said_by(specialist, target, "sql")


def test_each_workload_goes_to_the_drafter_that_is_good_at_it(
    rig: Rig, specialist: CausalLM, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    rig.add("special", specialist)
    for _ in range(6):
        rig.window("general", [*chat, *sql])
    assert rig.look() == 6
    assert rig.routed() == {"sql": ("special", LEARNED)}
    standings = rig.standings.of(rig.fingerprint)
    assert standings["sql"]["special"].scores["greedy"].mean == pytest.approx(1.0)
    assert standings["chat"]["general"].scores["greedy"].mean == pytest.approx(1.0)
    assert standings["sql"]["special"].weight > 0.9 < standings["chat"]["general"].weight
    (route,) = rig.routes.of(rig.fingerprint)
    assert "acceptance probability 1.000 (greedy) against 0." in route.reason
    assert _reasons(rig.engine, "route.put") == [route.reason]


def test_nothing_is_routed_before_there_are_requests_enough(
    rig: Rig, specialist: CausalLM, sql: list[FeedbackRecord]
) -> None:
    rig.add("special", specialist)
    for _ in range(REQUESTS // len(sql) - 1):
        rig.window("general", sql)
    assert rig.look() > 0
    assert rig.routed() == {}
    for _ in range(2):
        rig.window("general", sql)
    rig.look()
    assert rig.routed() == {"sql": ("special", LEARNED)}


def test_a_route_follows_when_another_drafter_becomes_better(
    rig: Rig, specialist: CausalLM, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    """The workload's text changes to what the general drafter says."""
    rig.add("special", specialist)
    for _ in range(6):
        rig.window("general", sql)
    rig.look()
    assert rig.routed() == {"sql": ("special", LEARNED)}
    for _ in range(6):
        rig.window("special", [msgspec.structs.replace(record, workload="sql") for record in chat])
    rig.look()
    assert rig.routed() == {}
    assert "of special after" in _reasons(rig.engine, "route.remove")[0]


def test_an_operators_route_stays(
    rig: Rig, specialist: CausalLM, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    rig.add("special", specialist)
    rig.routes.put(rig.fingerprint, "sql", "", MANUAL, "me")
    rig.routes.put(rig.fingerprint, "chat", "special", MANUAL, "me")
    for _ in range(6):
        rig.window("general", [*chat, *sql])
    assert rig.look() == 6
    assert rig.routed() == {"sql": ("", MANUAL), "chat": ("special", MANUAL)}


@pytest.mark.parametrize("mode", ["off", "label"])
def test_the_machine_routes_only_where_it_is_told_to(rig: Rig, sql: list[FeedbackRecord], mode: str) -> None:
    rig.window("general", sql)
    assert rig.look(RoutingConfig(routing=mode)) == 0  # type: ignore[arg-type]
    assert rig.standings.of(rig.fingerprint) == {}


def test_a_window_is_scored_once_however_often_it_is_looked_at(rig: Rig, chat: list[FeedbackRecord]) -> None:
    rig.window("general", chat)
    assert (rig.look(), rig.look()) == (1, 0)
    assert rig.standings.of(rig.fingerprint)["chat"]["general"].scored == len(chat)


def test_no_drafter_is_scored_on_what_it_was_trained_on(
    rig: Rig, specialist: CausalLM, sql: list[FeedbackRecord]
) -> None:
    """The version that a window led to is newer than the window."""
    window, first = rig.window("general", sql), rig.registry.live("general")
    blob = rig.versions.save(specialist)
    second = rig.registry.add_candidate(first, blob.sha256, blob.size, window.id, make_training())
    rig.registry.promote(second, first, "test", "it was trained on the window")
    rig.look()
    assert rig.standings.of(rig.fingerprint)["sql"]["general"].version == 1
    rig.window("general", sql)
    rig.look()
    assert rig.standings.of(rig.fingerprint)["sql"]["general"].version == 2


def test_a_drafter_whose_weights_are_damaged_is_left_out(
    rig: Rig, specialist: CausalLM, sql: list[FeedbackRecord]
) -> None:
    rig.add("special", specialist)
    rig.blobs.delete(rig.registry.live("special").weights_sha256)
    rig.window("general", sql)
    assert rig.look() == 1
    assert list(rig.standings.of(rig.fingerprint)["sql"]) == ["general"]


def test_a_novel_workload_gets_its_own_drafter_and_no_more_are_made_than_allowed(
    rig: Rig, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    other = [msgspec.structs.replace(record, workload="other") for record in sql[: len(sql) // 2]]
    for _ in range(12):
        rig.window("general", [*chat, *sql, *other])
    rig.look(RoutingConfig(routing="learned", routing_requests=REQUESTS, routing_drafters=1))
    assert rig.routed() == {"sql": ("general--sql", NOVEL)}
    made = rig.registry.live("general--sql")
    assert (made.number, made.weights_sha256) == (1, rig.registry.live("general").weights_sha256)
    (reason,) = _reasons(rig.engine, "drafter.own")
    assert "1.000 on the other workloads (greedy;" in reason
    assert rig.registry.choose("", rig.fingerprint).name == "general"
    rig.window("general", chat)
    rig.look()
    assert set(rig.routed()) == {"sql", "other"}


def test_a_workload_of_little_traffic_gets_none(
    rig: Rig, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    for _ in range(24):
        rig.window("general", [*chat, sql[0]])
    rig.look(RoutingConfig(routing="learned", routing_requests=REQUESTS // 2, routing_share=0.2))
    assert rig.routed() == {}


def test_a_workload_that_went_silent_gives_its_place_back(
    rig: Rig, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    for _ in range(6):
        rig.window("general", [*chat, *sql])
    rig.look()
    assert "sql" in rig.routed()
    with rig.engine.begin() as connection:
        connection.execute(text("UPDATE own_drafter SET at = '2026-01-01 00:00:00+00:00'"))
    rig.window("general", chat)
    rig.look()
    assert rig.routed() == {}
    assert rig.registry.drafter("general--sql").retired_at is not None
    assert "nothing came in" in _reasons(rig.engine, "drafter.retire")[0]


def test_an_own_drafter_that_became_worse_than_the_general_one_goes(
    rig: Rig, specialist: CausalLM, chat: list[FeedbackRecord], sql: list[FeedbackRecord]
) -> None:
    for _ in range(6):
        rig.window("general", [*chat, *sql])
    rig.look()
    first, blob = rig.registry.live("general--sql"), rig.versions.save(specialist)
    window = rig.window("general--sql", sql[:1])
    second = rig.registry.add_candidate(first, blob.sha256, blob.size, window.id, make_training())
    rig.registry.promote(second, first, "test", "by mistake")
    for _ in range(12):
        rig.window("general--sql", [msgspec.structs.replace(record, workload="sql") for record in chat])
    rig.look()
    assert rig.routed() == {}
    assert rig.registry.drafter("general--sql").retired_at is not None


def test_its_own_records_train_the_drafter_of_a_novel_workload(
    rig: Rig, target: Target, chat: list[FeedbackRecord], client: Redis
) -> None:
    """From the stream of its own to a promoted version, which the next window's replay prefers to the general one."""
    prompts = [random_prompt(target, n, 6) for n in range(8)]
    novel = [msgspec.structs.replace(a, workload="novel") for a in answers(target, prompts, 24)]
    for _ in range(6):
        rig.window("general", [*chat, *novel])
    rig.look()
    assert rig.routed() == {"novel": ("general--novel", NOVEL)}
    stream = FeedbackStream(client, "general--novel")
    stream.append([encode(rig._asked_again(novel[n % 8], "general--novel")) for n in range(40)])
    decision = _adapted(rig, "general--novel", stream)
    assert decision is not None
    assert decision.promote, decision.reason
    for _ in range(4):
        rig.window("general--novel", novel)
    rig.look()
    standings = rig.standings.of(rig.fingerprint)["novel"]
    assert standings["general--novel"].version == 2
    assert standings["general--novel"].weight > standings["general"].weight
    assert rig.routed() == {"novel": ("general--novel", NOVEL)}


def test_the_trainer_routes_when_it_is_rung_for(
    rig: Rig, target_dir: Path, database_url: str, sql: list[FeedbackRecord], tmp_path: Path, specialist: CausalLM
) -> None:
    rig.add("special", specialist)
    for _ in range(6):
        rig.window("general", sql)
    environ = {
        "REDRAFT_HOME": str(tmp_path),
        "REDRAFT_DATABASE_URL": database_url,
        "REDRAFT_REDIS_URL": "unix:///nobody/listens.sock",
        "REDRAFT_TARGET": str(target_dir),
        "REDRAFT_CACHE": str(tmp_path / "cache"),
        "REDRAFT_DTYPE": "fp32",
        "REDRAFT_DEVICE": "cpu",
        "REDRAFT_DRAFTER": "general",
        "REDRAFT_ROUTING": "learned",
        "REDRAFT_ROUTING_REQUESTS": str(REQUESTS),
    }
    learner = Learner(environ)
    learner.route()
    assert len(rig.standings.unscored(rig.fingerprint)) == 2  # a few windows at a time
    learner.route()
    assert rig.routed() == {"sql": ("special", LEARNED)}


@torch.inference_mode()
def said_by(drafter: CausalLM, target: Target, workload: str) -> list[FeedbackRecord]:
    """Eight greedy requests whose output the drafter chooses token by token; without rounds and rows."""
    prompts = [random_prompt(target, n, 6) for n in range(8)]
    found = []
    for answer in answers(target, prompts, 4):
        tokens = answer.prompt.tolist()
        for _ in range(TOKENS):
            logits = drafter.logits(drafter.hidden(torch.tensor([tokens]))[0, -1:])[0]
            tokens.append(int(drafter.draft_to_target[logits.argmax()]))
        empty = msgspec.structs.replace(answer.teacher, positions=b"", ids=b"", log_probs=b"", tail_log_mass=b"")
        output = int32(tokens[-TOKENS:])
        found.append(msgspec.structs.replace(answer, workload=workload, output_ids=output, teacher=empty))
    return found


def _adapted(rig: Rig, name: str, stream: FeedbackStream) -> Decision | None:
    jobs = Jobs(rig.engine)
    job = jobs.request("adapt", name)
    assert job is not None
    lease = jobs.take(job.id, "test", lease_seconds=60)
    assert lease is not None
    stores = Stores(stream, rig.windows, Registry(rig.engine, lease), rig.versions, lease)
    return adapt_once(rig.registry.drafter(name), stores, CONFIG, lambda: None)


def _reasons(engine: Engine, action: str) -> list[str]:
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT reason FROM audit_log WHERE action = :action ORDER BY id"), {"action": action}
        )
        return list(found.scalars())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
