"""Poisoned feedback through the whole circle: the live pointer does not move, and what was left out is counted."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import Engine as Database

from adapter.target import Target
from storage import left_out
from storage.jobs import Jobs
from storage.records import FeedbackRecord, decode, encode, int32
from storage.stream import RECORD
from storage.windows import Windows
from tests.circle import CONFIG, Circle, running_circle, tiny_first, tiny_prompts
from tests.service.engine.oracle import random_prompt
from tests.valkey_fixture import ValkeyServer

GUARDED = replace(CONFIG, trigger=replace(CONFIG.trigger, window_copies=3))
Tamper = Callable[[FeedbackRecord], FeedbackRecord]


@pytest.fixture
def circle(target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Circle]:
    with running_circle(target, engine, valkey.url, tmp_path, tiny_first(target), GUARDED) as circle:
        yield circle


def test_one_request_repeated_moves_nothing(circle: Circle) -> None:
    circle.send([random_prompt(circle.target, 0, 6)] * 48)
    assert _adapt(circle) is None
    assert circle.registry.live("demo").number == 1
    assert len(circle.registry.versions("demo")) == 1
    assert _counts(circle) == {"repeated": 37}


def test_degenerate_records_are_quarantined_and_the_sound_ones_after_them_are_learnt_from(circle: Circle) -> None:
    circle.send(tiny_prompts(circle.target, 8))
    sound = _taken(circle)
    for n, tamper in enumerate(TAMPERED * 10):
        record = tamper(sound[n % len(sound)])
        circle.stream.append([encode(msgspec.structs.replace(record, record_id=f"bad{n}"))])
    assert _adapt(circle) is None
    assert circle.registry.live("demo").number == 1
    assert _counts(circle) == {"quarantined": 40}
    assert sorted(_reasons(circle)) == [
        "output ids outside the vocabulary of 320",
        "teacher log-probabilities must be numbers of at most 0",
        "teacher rows hold a mass of 64.000 to 64.000, not 1",
        "the greedy token is not the one its teacher row finds likeliest",
    ]
    circle.config = CONFIG
    circle.send(tiny_prompts(circle.target, 48))
    assert _adapt(circle) is True
    assert circle.registry.live("demo").number == 2


def test_a_tenth_of_degenerate_records_is_left_out_of_the_window(circle: Circle) -> None:
    circle.config = CONFIG
    circle.send(tiny_prompts(circle.target, 48))
    records = _taken(circle)
    mixed = [TAMPERED[n % 4](record) if n % 10 == 0 else record for n, record in enumerate(records)]
    circle.stream.append([encode(record) for record in mixed])
    assert _adapt(circle) is not None
    version = circle.registry.versions("demo")[-1].version
    assert version.window_id is not None
    window = _windows(circle).window(version.window_id)
    assert (window.cause, window.left_out) == ("size", {"quarantined": 4})
    assert window.training + window.holdout == 36


def test_a_flood_of_one_workload_leaves_room_for_the_others(circle: Circle) -> None:
    circle.config = CONFIG
    circle.send(tiny_prompts(circle.target, 60))
    flood = [msgspec.structs.replace(record, workload="flood") for record in _taken(circle)]
    circle.send(tiny_prompts(circle.target, 20))
    others = _taken(circle)
    mixed = [r for n in range(20) for r in (*flood[3 * n : 3 * n + 3], others[n])]
    circle.stream.append([encode(record) for record in mixed])
    _adapt(circle)
    (window,) = _windows(circle).recent("demo", 5)
    records = _windows(circle).records(window)
    workloads = [r.workload for r in (*records.training, *records.holdout)]
    assert (workloads.count("flood"), workloads.count("demo")) == (30, 10)


def _out_of_vocabulary(record: FeedbackRecord) -> FeedbackRecord:
    return msgspec.structs.replace(record, output_ids=int32(record.output + 10_000))


def _not_a_number(record: FeedbackRecord) -> FeedbackRecord:
    return _with_log_probs(record, float("nan"))


def _all_nought(record: FeedbackRecord) -> FeedbackRecord:
    return _with_log_probs(record, 0.0)


def _contradicting(record: FeedbackRecord) -> FeedbackRecord:
    """Rows with the ids in other places: each is sound, and none belongs to the text."""
    _, ids, _, _ = record.teacher.arrays()
    turned = np.roll(ids, 1, axis=1).astype("<i4").tobytes()
    return msgspec.structs.replace(record, teacher=msgspec.structs.replace(record.teacher, ids=turned))


def _with_log_probs(record: FeedbackRecord, value: float) -> FeedbackRecord:
    rows = record.teacher
    filled = np.full(len(rows.log_probs) // 2, value, dtype="<f2").tobytes()
    nothing = np.full(len(rows.tail_log_mass) // 4, -np.inf, dtype="<f4").tobytes()
    return msgspec.structs.replace(
        record, teacher=msgspec.structs.replace(rows, log_probs=filled, tail_log_mass=nothing)
    )


TAMPERED: tuple[Tamper, ...] = (_out_of_vocabulary, _not_a_number, _all_nought, _contradicting)


def _adapt(circle: Circle) -> bool | None:
    """One update, as the sweep rings for it: whether it promoted; None where there was nothing to decide."""
    (job,) = circle.housekeeper.sweep()
    stores = circle.stores(job)
    decision = circle.adapt(stores)
    Jobs(circle.database).finish(stores.lease, "done")
    return None if decision is None else decision.promote


def _taken(circle: Circle) -> list[FeedbackRecord]:
    """The records on the stream, which is then empty."""
    found = circle.stream.client.xrange(circle.stream.key)
    circle.stream.client.delete(circle.stream.key)
    return [decode(fields[RECORD]) for _, fields in found]


def _counts(circle: Circle) -> dict[str, int]:
    return {f.guard: f.records for f in left_out.totals(circle.database, "demo")}


def _windows(circle: Circle) -> Windows:
    return Windows(circle.database, circle.blobs)


def _reasons(circle: Circle) -> set[str]:
    """Why entries were quarantined, without the positions."""
    found = circle.stream.client.xrange(circle.stream.quarantine_key)
    return {re.sub(r" at output index \d+", "", fields[b"reason"].decode()) for _, fields in found}
