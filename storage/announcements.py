"""The word that a drafter's pointer moved, on a Redis channel: it saves a server up to one polling interval.

Only a hint. The pointer is the row in the database; a message lost, late, doubled or forged costs one look
at that row.
"""

import time

import msgspec
import redis
from redis.client import PubSub
from sqlalchemy import Engine

from storage import outbox
from storage.redis_clients import hot

POINTER_CHANNEL = "redraft:pointer"
RECONNECT_SECONDS = 1.0


class PointerMoved(msgspec.Struct, frozen=True):
    drafter: str
    generation: int


_decoder = msgspec.json.Decoder(PointerMoved)


def announce(client: redis.Redis, drafter: str, generation: int) -> None:
    """Tell whoever listens; raises `redis.RedisError` when the message could not be sent."""
    client.publish(POINTER_CHANNEL, msgspec.json.encode(PointerMoved(drafter, generation)))


def announce_pending(engine: Engine, client: redis.Redis) -> None:
    """Send what the outbox holds; raises `redis.RedisError`, and what was not sent stays there."""
    for message in outbox.pending(engine):
        announce(client, message.payload["drafter"], message.payload["generation"])
        outbox.mark_sent(engine, [message.id])


class Announcements:
    """One drafter's announcements. While Redis is away, `wait` just waits and tries to subscribe again."""

    def __init__(self, url: str, drafter: str) -> None:
        self.drafter = drafter
        self._client = hot(url)
        self._subscription: PubSub | None = None
        self._retry_at = 0.0

    @property
    def connected(self) -> bool:
        return self._subscription is not None

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True as soon as a message says that this drafter's pointer moved."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._heard(left):
                    return True
            except redis.RedisError:
                self._lost()
        return False

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._client.close()

    def _heard(self, seconds: float) -> bool:
        if self._subscription is None and not self._subscribe(seconds):
            return False
        assert self._subscription is not None
        message = self._subscription.get_message(ignore_subscribe_messages=True, timeout=seconds)
        return message is not None and self._concerns_us(message["data"])

    def _subscribe(self, seconds: float) -> bool:
        """Subscribe when it is time to try; else wait, at most `seconds`, until it is."""
        pause = self._retry_at - time.monotonic()
        if pause > 0:
            time.sleep(min(pause, seconds))
            return False
        subscription: PubSub = self._client.pubsub()  # type: ignore[no-untyped-call]
        try:
            subscription.subscribe(POINTER_CHANNEL)
        except redis.RedisError:
            subscription.close()
            raise
        self._subscription = subscription
        return True

    def _lost(self) -> None:
        self._retry_at = time.monotonic() + RECONNECT_SECONDS
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def _concerns_us(self, data: bytes) -> bool:
        try:
            return _decoder.decode(data).drafter == self.drafter
        except msgspec.MsgspecError:
            return False
