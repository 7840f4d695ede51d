"""A feedback stream on a real Valkey, for the drafter that these tests call `chat`; and requests to learn from."""

from collections.abc import Iterator

import pytest
from redis import Redis

from adapter.sample import answers, chat_prompt
from adapter.target import Target
from storage.records import FeedbackRecord
from storage.redis_clients import consume
from storage.stream import FeedbackStream
from tests.tiny import TEXT
from tests.valkey_fixture import ValkeyServer


@pytest.fixture(scope="session")
def answered(target: Target) -> list[FeedbackRecord]:
    """Greedy traffic of the tiny target, with teacher rows everywhere."""
    prompts = [chat_prompt(target, f"{line} {n}") for n in range(4) for line in TEXT]
    return list(answers(target, prompts, max_tokens=24, top_k=16))


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[Redis]:
    with valkey.client() as client:
        yield client


@pytest.fixture
def redis(valkey: ValkeyServer) -> Iterator[Redis]:
    """As the worker's own processes read it."""
    with consume(valkey.url) as client:
        yield client


@pytest.fixture
def stream(client: Redis) -> FeedbackStream:
    return FeedbackStream(client, "chat")
