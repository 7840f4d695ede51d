"""The feedback writer: `put` never waits, whatever Redis does, and each record is written or counted as dropped."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from service import feedback
from service.feedback import FeedbackConfig, FeedbackWriter
from storage.records import FeedbackRecord, decode
from storage.stream import FeedbackStream
from tests.lossy_proxy import LossyProxy
from tests.storage.rows import make_record
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until

Writers = Callable[..., FeedbackWriter]
TYPICAL_SECONDS = 50e-6


@pytest.fixture
def writer_to() -> Iterator[Writers]:
    """Makes writers of the drafter `chat`, and closes them after the test."""
    made: list[FeedbackWriter] = []

    def make(url: str, queue: int = 2000) -> FeedbackWriter:
        made.append(FeedbackWriter(url, "chat", config=FeedbackConfig(feedback_queue=queue)))
        return made[-1]

    yield make
    for writer in made:
        writer.close(timeout=0)


def records(count: int, start: int = 0) -> list[FeedbackRecord]:
    return [make_record(f"r{number:05}") for number in range(start, start + count)]


def put(writer: FeedbackWriter, some: list[FeedbackRecord]) -> list[float]:
    """Hand the records over; how long each `put` took, in seconds."""
    times = []
    for record in some:
        began = time.perf_counter()
        writer.put(record)
        times.append(time.perf_counter() - began)
    return times


def on_stream(server: ValkeyServer) -> list[FeedbackRecord]:
    client = server.client()
    return [decode(fields[b"b"]) for _, fields in client.xrange(FeedbackStream(client, "chat").key)]


def test_records_arrive_as_they_were_and_in_order(valkey: ValkeyServer, writer_to: Writers) -> None:
    writer, sent = writer_to(valkey.url), records(200)
    put(writer, sent)
    writer.close(timeout=30)
    assert on_stream(valkey) == sent
    assert (writer.written, writer.dropped) == (200, {})


def test_put_takes_microseconds_while_redis_answers(valkey: ValkeyServer, writer_to: Writers) -> None:
    assert statistics.median(put(writer_to(valkey.url), records(2000))) < TYPICAL_SECONDS


def test_put_takes_microseconds_while_redis_is_frozen(own_valkey: ValkeyServer, writer_to: Writers) -> None:
    own_valkey.freeze()
    writer = writer_to(own_valkey.url, queue=100)
    assert statistics.median(put(writer, records(2000))) < TYPICAL_SECONDS


def test_put_takes_microseconds_where_there_is_no_redis(tmp_path: Path, writer_to: Writers) -> None:
    writer = writer_to(f"unix://{tmp_path}/none.sock", queue=100)
    assert statistics.median(put(writer, records(2000))) < TYPICAL_SECONDS


def test_a_frozen_redis_costs_the_oldest_records_and_each_is_counted(
    own_valkey: ValkeyServer, writer_to: Writers
) -> None:
    writer = writer_to(own_valkey.url, queue=50)
    own_valkey.freeze()
    put(writer, records(1))
    until(lambda: not writer.reachable)
    put(writer, records(120, start=1))
    assert writer.dropped == {"full": 70}
    own_valkey.thaw()
    until(lambda: writer.written == 51)
    kept = {record.record_id for record in on_stream(own_valkey)}
    assert kept == {record.record_id for record in [*records(1), *records(50, start=71)]}


def test_writing_goes_on_soon_after_a_thaw_however_long_it_was_frozen(
    own_valkey: ValkeyServer, writer_to: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "FIRST_PAUSE", 100)  # as after many tries
    writer = writer_to(own_valkey.url)
    own_valkey.freeze()
    put(writer, records(10))
    until(lambda: not writer.reachable)
    own_valkey.thaw()
    until(lambda: writer.written == 10)


def test_a_long_outage_writes_at_most_the_batch_in_flight_twice(own_valkey: ValkeyServer, writer_to: Writers) -> None:
    writer = writer_to(own_valkey.url)
    put(writer, records(1))
    until(lambda: writer.written == 1)
    own_valkey.freeze()
    put(writer, records(1, start=1))
    time.sleep(1.5)  # several tries
    own_valkey.thaw()
    until(lambda: writer.written == 2)
    assert [record.record_id for record in on_stream(own_valkey)].count("r00001") <= 2


def test_a_killed_and_restarted_redis_loses_no_record(own_valkey: ValkeyServer, writer_to: Writers) -> None:
    writer = writer_to(own_valkey.url)
    put(writer, records(20))
    own_valkey.kill()
    put(writer, records(20, start=20))
    until(lambda: not writer.reachable)
    own_valkey.start()
    until(lambda: writer.written == 40)
    assert {record.record_id for record in on_stream(own_valkey)} == {r.record_id for r in records(40)}
    assert writer.dropped == {}


def test_cut_connections_lose_no_record(valkey: ValkeyServer, writer_to: Writers) -> None:
    writer, killer = writer_to(valkey.url), valkey.client()
    for number in range(100):
        put(writer, records(1, start=number))
        if number % 10 == 0:
            killer.client_kill_filter(_type="normal", skipme=True)
    until(lambda: writer.written == 100)
    assert {record.record_id for record in on_stream(valkey)} == {r.record_id for r in records(100)}


def test_a_lost_reply_costs_a_copy_and_not_the_record(
    valkey: ValkeyServer, lossy: LossyProxy, writer_to: Writers
) -> None:
    writer = writer_to(f"{lossy.url}&socket_timeout=1")
    put(writer, records(1))
    until(lambda: writer.written == 1)
    lossy.losing = True
    put(writer, records(1, start=1))
    until(lambda: not writer.reachable)
    lossy.losing = False
    until(lambda: writer.written == 2)
    assert [record.record_id for record in on_stream(valkey)] == ["r00000", "r00001", "r00001"]


def test_a_redis_that_is_wiped_gets_what_comes_after(valkey: ValkeyServer, writer_to: Writers) -> None:
    writer = writer_to(valkey.url)
    put(writer, records(5))
    until(lambda: writer.written == 5)
    valkey.client().flushall()
    put(writer, records(5, start=5))
    until(lambda: writer.written == 10)
    assert on_stream(valkey) == records(5, start=5)


def test_records_refused_for_want_of_memory_are_dropped_and_counted(
    own_valkey: ValkeyServer, writer_to: Writers
) -> None:
    writer = writer_to(own_valkey.url)
    own_valkey.client().config_set("maxmemory", 1)
    put(writer, records(5))
    until(lambda: writer.dropped == {"refused": 5})
    own_valkey.client().config_set("maxmemory", 0)
    put(writer, records(5, start=5))
    until(lambda: writer.written == 5)


def test_a_record_that_cannot_be_encoded_is_dropped_alone(valkey: ValkeyServer, writer_to: Writers) -> None:
    writer = writer_to(valkey.url)
    broken = msgspec.structs.replace(make_record("broken"), tenant=object())
    put(writer, [*records(2), broken, *records(2, start=2)])
    until(lambda: writer.written == 4)
    assert writer.dropped == {"encoding": 1}


def test_closing_without_redis_ends_in_time_and_counts_what_is_left(tmp_path: Path, writer_to: Writers) -> None:
    writer = writer_to(f"unix://{tmp_path}/none.sock")
    put(writer, records(100))
    began = time.monotonic()
    writer.close(timeout=0.3)
    assert time.monotonic() - began < 10
    assert (writer.written, writer.dropped) == (0, {"unreachable": 100})


def test_a_record_after_the_close_is_counted(valkey: ValkeyServer, writer_to: Writers) -> None:
    writer = writer_to(valkey.url)
    writer.close()
    put(writer, records(3))
    assert writer.dropped == {"closed": 3}


def test_the_stream_keeps_to_the_length_it_was_given(valkey: ValkeyServer) -> None:
    writer = FeedbackWriter(valkey.url, "chat", length=100)
    put(writer, records(1500))
    writer.close(timeout=30)
    assert writer.written == 1500
    assert 100 <= len(on_stream(valkey)) <= 300
