"""What Prometheus reads, held against the requests that were made and the parts that are watched."""

from collections import Counter
from collections.abc import Iterator
from threading import Event

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine as Database

from adapter.policy import Policy
from adapter.target import Target
from adapter.typical import Typical
from service.engine.engine import Engine
from service.engine.generation import Delta, Generation
from service.engine.governor import RowClass
from service.feedback import FeedbackWriter
from service.live import LiveFollower
from service.metrics import OTHER, WORKLOADS, Metrics
from service.placing import Offer
from storage.records import Round
from storage.registry import Registry, Version
from storage.servers import Servers
from tests.service.conftest import CONFIG, VERSION
from tests.service.engine.machine import Machine, governed
from tests.service.engine.oracle import UNGOVERNED, first_layers
from tests.storage.rows import make_drafter, make_record
from tests.valkey_fixture import ValkeyServer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(metrics: Metrics) -> Samples:
    """Every sample by name and labels, as Prometheus reads them."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(read: Samples, name: str, **labels: str) -> float:
    return read[(f"redraft_{name}", frozenset(labels.items()))]


def decode(target: Target, engine: Engine, request_id: str, workload: str) -> Generation:
    """One request through the engine, finished."""
    done = Event()

    def hear(delta: Delta) -> None:
        if delta.finish_reason:
            done.set()

    ids = target.tokenizer("select name from city")["input_ids"]
    generation = Generation(request_id, ids, Policy(0.0), 24, hear, workload=workload)
    engine.submit(generation)
    assert done.wait(timeout=30)
    return generation


@pytest.fixture(scope="module")
def counted(tiny_target: Target) -> Iterator[tuple[Samples, list[Generation]]]:
    """The figures after three requests of two workloads."""
    metrics = Metrics()
    engine = Engine(tiny_target, CONFIG, metrics.finished, UNGOVERNED)
    engine.start()
    engine.swap(VERSION, first_layers(tiny_target)).result(timeout=20)
    asked = [decode(tiny_target, engine, f"r{i}", w) for i, w in enumerate(["sql", "sql", "chat"])]
    yield samples(metrics), asked
    engine.stop()


def test_requests_and_tokens_are_counted_by_workload(counted: tuple[Samples, list[Generation]]) -> None:
    read, asked = counted
    assert value(read, "requests_total", workload="sql", finish_reason=asked[0].finish_reason or "") == 2
    assert value(read, "requests_total", workload="chat", finish_reason=asked[2].finish_reason or "") == 1
    assert value(read, "output_tokens_total", workload="chat") == len(asked[2].output_ids)


def test_the_speculative_counters_are_sums_over_the_rounds(counted: tuple[Samples, list[Generation]]) -> None:
    read, asked = counted
    rounds = [r for generation in asked[:2] for r in generation.rounds]
    labels = {"drafter": "", "version": str(VERSION), "workload": "sql"}
    assert rounds
    assert value(read, "spec_decode_num_drafts_total", **labels) == len(rounds)
    assert value(read, "spec_decode_num_draft_tokens_total", **labels) == sum(r.proposed for r in rounds)
    assert value(read, "spec_decode_num_accepted_tokens_total", **labels) == sum(r.accepted for r in rounds)


def test_lossy_requests_have_counters_of_their_own(tiny_target: Target) -> None:
    metrics, generation = Metrics(), Generation("r", [1], Policy(0.8), 8, lambda delta: None, typical=Typical())
    generation.rounds, generation.finish_reason = [Round(1, VERSION, 4, 3, 5, 1.0, 1.0, 1.0)], "stop"
    metrics.finished(generation)
    read, labels = samples(metrics), {"drafter": "", "version": str(VERSION), "workload": "default"}
    assert value(read, "lossy_requests_total", workload="default") == 1
    assert value(read, "lossy_spec_decode_num_draft_tokens_total", **labels) == 4
    assert value(read, "lossy_spec_decode_num_accepted_tokens_total", **labels) == 3
    assert not any(name.startswith("redraft_spec_decode") for name, _ in read)


def test_accepted_tokens_by_position_add_up_to_the_accepted_ones(
    counted: tuple[Samples, list[Generation]],
) -> None:
    read, asked = counted
    rounds = [r for generation in asked for r in generation.rounds]
    expected = Counter(str(position) for r in rounds for position in range(r.accepted))
    found: Counter[str] = Counter()
    for (name, labels), count in read.items():
        if name == "redraft_spec_decode_num_accepted_tokens_per_pos_total":
            found[dict(labels)["position"]] += int(count)
    assert found == expected
    assert expected["0"] > 0


def test_times_are_observed_once_a_request_and_once_a_round(
    counted: tuple[Samples, list[Generation]],
) -> None:
    read, asked = counted
    rounds = [r for generation in asked for r in generation.rounds]
    assert value(read, "time_to_first_token_seconds_count") == len(asked)
    assert value(read, "request_seconds_sum") == pytest.approx(sum(g.finished_at - g.submitted_at for g in asked))
    assert value(read, "verify_seconds_count") == len(rounds)
    assert value(read, "draft_seconds_sum") == pytest.approx(sum(r.draft_ms for r in rounds) / 1e3)


def test_more_workloads_than_are_kept_apart_share_a_label() -> None:
    metrics = Metrics()
    for i in range(WORKLOADS + 3):
        metrics.finished(Generation(f"r{i}", [1], Policy(0.0), 1, print, workload=f"w{i}", finish_reason="cancelled"))
    read = samples(metrics)
    assert value(read, "requests_total", workload="w0", finish_reason="cancelled") == 1
    assert value(read, "requests_total", workload=OTHER, finish_reason="cancelled") == 3


def test_the_state_of_the_parts_is_read_when_asked(engine: Database, decoder: Engine, valkey: ValkeyServer) -> None:
    make_drafter(Registry(engine))
    writer = FeedbackWriter(valkey.url, "chat")
    follower = follow(engine, valkey.url)
    metrics = Metrics()
    metrics.watch(decoder)
    metrics.follow("", writer, follower)
    before = samples(metrics)
    follower.follow_once()
    writer.put(make_record("one"))
    writer.close()
    writer.put(make_record("too late"))
    after = samples(metrics)
    chat = {"drafter": "chat"}
    assert value(after, "live_version", **chat) == VERSION
    assert (value(before, "live_generation", **chat), value(after, "live_generation", **chat)) == (0, 1)
    assert (value(before, "swaps_total", **chat), value(after, "swaps_total", **chat)) == (0, 1)
    assert value(after, "swap_failures_total", **chat) == 0
    assert (value(before, "feedback_written_total", **chat), value(after, "feedback_written_total", **chat)) == (0, 1)
    assert value(after, "feedback_dropped_total", **chat, reason="closed") == 1
    assert value(after, "requests_running") == value(after, "requests_waiting") == 0
    metrics.unfollow("")
    assert "redraft_live_version" not in {name for name, _ in samples(metrics)}


def test_the_governor_is_shown_with_as_many_labels_as_the_requests_have(tiny_target: Target) -> None:
    metrics, machine = Metrics(), Machine(lambda _, row_class: 0.8)
    decoder = Engine(tiny_target, CONFIG, metrics.finished)
    governor = decoder.governor
    assert governor is not None
    for i in range(WORKLOADS - 1):
        metrics.finished(Generation(f"r{i}", [1], Policy(0.0), 1, print, workload=f"w{i}", finish_reason="cancelled"))
    governed(machine, governor, [RowClass("sql", "greedy")] * 3, 100)
    for i in range(3):
        governed(machine, governor, [RowClass(f"new{i}", "greedy")] * 3, 20)
    metrics.watch(decoder)
    read = samples(metrics)
    (choice,) = (c for c in governor.decisions() if c.workload == "sql")
    labels = {"workload": "sql", "policy": "greedy", "match": "none", "batch": "3"}
    assert value(read, "governor_draft_length", **labels) == choice.draft_length > 0
    assert value(read, "governor_speed_up", **labels) == pytest.approx(choice.speed_up)
    assert value(read, "governor_round_seconds", **labels, decoding="plain") == pytest.approx(choice.plain_ms / 1e3)
    speculative = value(read, "governor_tokens_per_second", **labels, decoding="speculative")
    assert speculative == pytest.approx(choice.speculative_progress * 1e3)
    assert value(read, "governor_survival", **labels, tokens="2") == pytest.approx(choice.survival[1])
    shown = {dict(labels)["workload"] for name, labels in read if name == "redraft_governor_draft_length"}
    assert OTHER in shown
    assert not {"new0", "new1", "new2"} & shown


def follow(database: Database, redis_url: str) -> LiveFollower[None]:
    """A follower that loads nothing and swaps at once."""

    def load(version: Version) -> None:
        return None

    def offer(offered: Offer[None]) -> None:
        return None

    registry, servers = Registry(database), Servers(database)
    return LiveFollower("chat", "server-1", "reference", registry, servers, load, offer, redis_url)
