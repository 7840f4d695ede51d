"""The feedback stream on a real Valkey: in order, at least once, and bounded. Its losses: test_stream_losses."""

import time

import pytest
import redis

from storage.redis_clients import hot
from storage.stream import ADAPT, HISTORY, RECORD, FeedbackStream, Waiting
from tests.lossy_proxy import LossyProxy
from tests.valkey_fixture import ValkeyServer

NODE = 100  # entries in a node of the stream, the unit of approximate trimming


@pytest.fixture
def stream(valkey: ValkeyServer) -> FeedbackStream:
    return FeedbackStream(valkey.client(), "chat")


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def read(stream: FeedbackStream, group: str = ADAPT, consumer: str = "a", count: int = 1000) -> list[bytes]:
    return [data for _, data in stream.read(group, consumer, count).entries]


def test_records_arrive_in_order(stream: FeedbackStream) -> None:
    assert stream.append(numbered(5)) == []
    assert read(stream) == numbered(5)


def test_each_group_sees_every_record(stream: FeedbackStream) -> None:
    stream.append(numbered(3))
    batch = stream.read(ADAPT, "a", 10)
    stream.acknowledge(ADAPT, [entry_id for entry_id, _ in batch.entries])
    assert read(stream, HISTORY) == numbered(3)


def test_drafters_have_streams_of_their_own(stream: FeedbackStream) -> None:
    stream.append(numbered(3))
    assert read(FeedbackStream(stream.client, "code")) == []


def test_records_come_again_until_they_are_acknowledged(stream: FeedbackStream) -> None:
    stream.append(numbered(4))
    first = stream.read(ADAPT, "a", 2)
    assert read(stream, count=2) == numbered(2)
    assert stream.acknowledge(ADAPT, [entry_id for entry_id, _ in first.entries]) == 2
    assert read(stream) == numbered(2, start=2)


def test_unacknowledged_records_come_before_new_ones_in_one_batch(stream: FeedbackStream) -> None:
    stream.append(numbered(2))
    read(stream)
    stream.append(numbered(2, start=2))
    assert read(stream, count=3) == numbered(3)


def test_what_a_dead_consumer_left_is_taken_over_once_it_is_idle(stream: FeedbackStream) -> None:
    stream.append(numbered(3))
    read(stream, consumer="dead")
    assert stream.read(ADAPT, "heir", 10, idle_ms=60_000).entries == ()
    time.sleep(0.02)
    heir = stream.read(ADAPT, "heir", 10, idle_ms=10)
    assert [data for _, data in heir.entries] == numbered(3)


def test_waiting_counts_what_is_unread_and_unacknowledged(stream: FeedbackStream) -> None:
    assert stream.waiting(ADAPT) == Waiting(0, 0.0)
    stream.append(numbered(5))
    batch = stream.read(ADAPT, "a", 3)
    assert stream.waiting(ADAPT).count == 5
    stream.acknowledge(ADAPT, [entry_id for entry_id, _ in batch.entries])
    assert stream.waiting(ADAPT).count == 2


@pytest.mark.parametrize("read_before", [False, True])
def test_waiting_knows_the_age_of_the_oldest(stream: FeedbackStream, read_before: bool) -> None:
    stream.client.xadd(stream.key, {RECORD: b"old"}, id=f"{int((time.time() - 90) * 1000)}-0")
    stream.append(numbered(1))
    if read_before:
        read(stream)
    assert 90 <= stream.waiting(ADAPT).oldest_age_seconds < 150


def test_reading_waits_for_a_record_but_not_longer_than_asked(stream: FeedbackStream) -> None:
    began = time.monotonic()
    assert stream.read(ADAPT, "a", 10, block_ms=100).entries == ()
    assert 0.1 <= time.monotonic() - began < 10


def test_after_redis_was_wiped_the_group_is_made_again(stream: FeedbackStream) -> None:
    stream.append(numbered(3))
    read(stream)
    stream.client.flushall()
    assert stream.waiting(ADAPT) == Waiting(0, 0.0)
    stream.client.flushall()
    stream.append(numbered(2, start=7))
    assert read(stream) == numbered(2, start=7)


def test_acknowledging_after_a_wipe_is_harmless(stream: FeedbackStream) -> None:
    stream.append(numbered(1))
    batch = stream.read(ADAPT, "a", 10)
    stream.client.flushall()
    assert stream.acknowledge(ADAPT, [entry_id for entry_id, _ in batch.entries]) == 0


def test_pending_and_acknowledged_survive_a_kill_of_the_server(own_valkey: ValkeyServer) -> None:
    stream = FeedbackStream(own_valkey.client(), "chat")
    stream.append(numbered(4))
    batch = stream.read(ADAPT, "a", 2)
    stream.acknowledge(ADAPT, [batch.entries[0][0]])
    own_valkey.kill_synced()
    own_valkey.start()
    assert read(stream) == numbered(3, start=1)


def test_entries_whose_reply_was_lost_come_with_the_next_read(stream: FeedbackStream, lossy: LossyProxy) -> None:
    stream.append(numbered(3))
    stream.waiting(ADAPT)  # makes the group
    through = FeedbackStream(hot(lossy.url), "chat")
    through.client.ping()
    lossy.losing = True
    with pytest.raises(redis.TimeoutError):
        through.read(ADAPT, "a", 10)
    lossy.losing = False
    assert read(through) == numbered(3)


def test_records_whose_reply_was_lost_were_added_once(stream: FeedbackStream, lossy: LossyProxy) -> None:
    through = FeedbackStream(hot(lossy.url), "chat")
    through.client.ping()
    lossy.losing = True
    with pytest.raises(redis.TimeoutError):
        through.append(numbered(3))
    assert read(stream) == numbered(3)


def test_the_stream_is_bounded_by_length(valkey: ValkeyServer) -> None:
    stream = FeedbackStream(valkey.client(), "chat", length=200)
    for start in range(0, 1000, 50):
        stream.append(numbered(50, start))
    assert 200 <= stream.client.xlen(stream.key) <= 200 + NODE


def test_old_records_are_trimmed_read_or_not(valkey: ValkeyServer) -> None:
    stream = FeedbackStream(valkey.client(), "chat", retention_hours=1)
    for hours in (3, 2, 0.5):
        stream.client.xadd(stream.key, {RECORD: b"%f" % hours}, id=f"{int((time.time() - hours * 3600) * 1000)}-0")
    assert stream.trim() == 2
    assert read(stream) == [b"%f" % 0.5]


def test_appending_trims_by_age_too(valkey: ValkeyServer) -> None:
    stream = FeedbackStream(valkey.client(), "chat", retention_hours=1)
    for number in range(NODE):
        stream.client.xadd(stream.key, {RECORD: b"old"}, id=f"1-{number}")
    stream.append(numbered(1))
    assert read(stream) == numbered(1)


def test_a_server_out_of_memory_refuses_each_record_and_says_so(own_valkey: ValkeyServer) -> None:
    stream = FeedbackStream(own_valkey.client(), "chat")
    stream.client.config_set("maxmemory", 1)
    refusals = stream.append(numbered(3))
    assert [type(refusal) for refusal in refusals] == [redis.exceptions.OutOfMemoryError] * 3


def test_the_quarantine_keeps_the_record_and_the_reason(stream: FeedbackStream) -> None:
    stream.quarantine(b"5-0", b"broken", "not a feedback record")
    ((_, fields),) = stream.client.xrange(stream.quarantine_key)
    assert fields == {b"id": b"5-0", RECORD: b"broken", b"reason": b"not a feedback record"}


def test_the_quarantine_is_trimmed_by_age_as_well(valkey: ValkeyServer) -> None:
    stream = FeedbackStream(valkey.client(), "chat", retention_hours=0)
    stream.quarantine(b"5-0", b"broken", "reason")
    time.sleep(0.01)
    stream.trim()
    assert stream.client.xlen(stream.quarantine_key) == 0


def test_an_entry_without_a_record_comes_as_an_empty_one(stream: FeedbackStream) -> None:
    stream.client.xadd(stream.key, {b"other": b"field"})
    assert read(stream) == [b""]
