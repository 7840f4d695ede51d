"""A feedback stream on a real Valkey, for the drafter that these tests call `chat`."""

from collections.abc import Iterator

import pytest
import redis

from storage.stream import FeedbackStream
from tests.valkey_fixture import ValkeyServer


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        yield client


@pytest.fixture
def stream(client: redis.Redis) -> FeedbackStream:
    return FeedbackStream(client, "chat")
