"""The word that a drafter's pointer, or a target's routes, moved: it saves a server up to one polling interval.

Only a hint, on one Redis channel. What counts are the rows in the database; a message lost, late, doubled or forged
costs one look at them.
"""

import time
from collections.abc import Callable

import msgspec
import redis
from redis.client import PubSub
from sqlalchemy import Engine

from storage import outbox
from storage.redis_clients import hot

POINTER_CHANNEL = "redraft:pointer"
RECONNECT_SECONDS = 1.0
SLICE = 0.2  # seconds; how soon the end of listening is noticed


class PointerMoved(msgspec.Struct, frozen=True):
    drafter: str
    generation: int


class RoutesMoved(msgspec.Struct, frozen=True):
    target: str  # fingerprint
    generation: int


_decoder = msgspec.json.Decoder(PointerMoved)
_routes_decoder = msgspec.json.Decoder(RoutesMoved)


def announce(client: redis.Redis, drafter: str, generation: int) -> None:
    """Tell whoever listens; raises `redis.RedisError` when the message could not be sent."""
    client.publish(POINTER_CHANNEL, msgspec.json.encode(PointerMoved(drafter, generation)))


def announce_routes(client: redis.Redis, target_fingerprint: str, generation: int) -> None:
    """Tell whoever listens; raises `redis.RedisError` when the message could not be sent."""
    client.publish(POINTER_CHANNEL, msgspec.json.encode(RoutesMoved(target_fingerprint, generation)))


def announce_pending(engine: Engine, client: redis.Redis) -> None:
    """Send what the outbox holds; raises `redis.RedisError`, and what was not sent stays there."""
    for message in outbox.pending(engine):
        if message.topic == outbox.ROUTES_TOPIC:
            announce_routes(client, message.payload["target"], message.payload["generation"])
        else:
            announce(client, message.payload["drafter"], message.payload["generation"])
        outbox.mark_sent(engine, [message.id])


class Announcements:
    """The announcements of a drafter, and of the routes of a target (its fingerprint); "": of none.

    While Redis is away, `wait` just waits and tries to subscribe again.
    """

    def __init__(self, url: str, drafter: str = "", target: str = "") -> None:
        self.drafter, self.target = drafter, target
        self._client = hot(url)
        self._subscription: PubSub | None = None
        self._retry_at = 0.0

    @property
    def connected(self) -> bool:
        return self._subscription is not None

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True as soon as a message says that this drafter's pointer, or its routes, moved."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._heard(left):
                    return True
            except redis.RedisError:
                self._lost()
        return False

    def listen(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Wait until a message concerns us or it is `ended`, which is asked all the while, but no longer than that."""
        deadline = time.monotonic() + seconds
        while not ended() and (left := deadline - time.monotonic()) > 0:
            if self.wait(min(left, SLICE)):
                return

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
            return bool(self.target) and self._concerns_our_routes(data)

    def _concerns_our_routes(self, data: bytes) -> bool:
        try:
            return _routes_decoder.decode(data).target == self.target
        except msgspec.MsgspecError:
            return False
