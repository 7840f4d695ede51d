"""What a bounded stream loses is counted, once: records trimmed before they were read or acknowledged."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.stream import ADAPT, FeedbackStream
from tests.valkey_fixture import ValkeyServer


@pytest.fixture
def stream(valkey: ValkeyServer) -> FeedbackStream:
    return FeedbackStream(valkey.client(), "chat")


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def read(stream: FeedbackStream, group: str = ADAPT, consumer: str = "a", count: int = 1000) -> list[bytes]:
    return [data for _, data in stream.read(group, consumer, count).entries]


def cut(stream: FeedbackStream, keep: int) -> None:
    stream.client.xtrim(stream.key, maxlen=keep, approximate=False)


def test_records_trimmed_while_pending_are_counted_once_and_let_go(stream: FeedbackStream) -> None:
    stream.append(numbered(10))
    read(stream)
    cut(stream, keep=4)
    batch = stream.read(ADAPT, "a", 10)
    assert [data for _, data in batch.entries] == numbered(4, start=6)
    assert batch.lost == 6
    assert stream.read(ADAPT, "a", 10).lost == 0
    assert stream.waiting(ADAPT).count == 4


def test_pending_records_of_a_dead_consumer_that_were_trimmed_are_counted(stream: FeedbackStream) -> None:
    stream.append(numbered(10))
    read(stream, consumer="dead")
    cut(stream, keep=4)
    time.sleep(0.02)
    batch = stream.read(ADAPT, "heir", 10, idle_ms=10)
    assert (len(batch.entries), batch.lost) == (4, 6)


def test_records_trimmed_before_they_were_read_are_counted(stream: FeedbackStream) -> None:
    stream.append(numbered(2))
    batch = stream.read(ADAPT, "a", 2)
    stream.acknowledge(ADAPT, [entry_id for entry_id, _ in batch.entries])
    stream.append(numbered(10))
    cut(stream, keep=4)
    assert stream.waiting(ADAPT).count == 4
    assert stream.read(ADAPT, "a", 10).lost == 6


def test_records_trimmed_before_the_group_was_made_are_counted(stream: FeedbackStream) -> None:
    stream.append(numbered(10))
    cut(stream, keep=4)
    batch = stream.read(ADAPT, "a", 10)
    assert (len(batch.entries), batch.lost) == (4, 6)


step = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("read"), st.integers(1, 6)),
    st.tuples(st.just("acknowledge"), st.integers(1, 6)),
    st.tuples(st.just("cut"), st.integers(0, 8)),
)


@given(steps=st.lists(step, max_size=25))
@settings(max_examples=60)
def test_every_record_is_acknowledged_waiting_or_counted_as_lost(
    stream: FeedbackStream, steps: list[tuple[str, int]]
) -> None:
    stream.client.flushall()
    stream.waiting(ADAPT)
    added = acknowledged = lost = 0
    held: tuple[tuple[bytes, bytes], ...] = ()
    # A stream trimmed to nothing shows its loss with the next record.
    for action, number in [*steps, ("append", 1), ("read", 1000)]:
        if action == "append":
            stream.append(numbered(number))
            added += number
        elif action == "read":
            batch = stream.read(ADAPT, "a", number)
            held, lost = batch.entries, lost + batch.lost
        elif action == "acknowledge":
            acknowledged += stream.acknowledge(ADAPT, [entry_id for entry_id, _ in held[:number]])
            held = held[number:]
        else:
            cut(stream, number)
    assert added == acknowledged + lost + stream.waiting(ADAPT).count
