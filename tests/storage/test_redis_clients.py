"""The client profiles: how long each may wait, and that nothing is sent twice behind the caller's back."""

import threading
import time
from pathlib import Path

import pytest
import redis
from kombu import Connection

from storage.redis_clients import LONGEST_BLOCK_MS, admin, celery_broker, consume, hot
from tests.lossy_proxy import LossyProxy
from tests.valkey_fixture import ValkeyServer

SLACK = 5.0  # seconds that a busy test machine may add


def test_the_hot_client_gives_up_on_a_frozen_server_after_200_ms(own_valkey: ValkeyServer) -> None:
    client = hot(own_valkey.url)
    client.ping()
    own_valkey.freeze()
    began = time.monotonic()
    with pytest.raises(redis.TimeoutError):
        client.ping()
    assert 0.15 < time.monotonic() - began < 0.2 + SLACK


def test_the_hot_client_gives_up_at_once_where_nobody_listens(tmp_path: Path) -> None:
    client = hot(f"unix://{tmp_path}/none.sock")
    began = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert time.monotonic() - began < SLACK


@pytest.mark.parametrize("profile", [hot, consume])
def test_a_lost_reply_is_not_asked_for_again(
    valkey: ValkeyServer, lossy: LossyProxy, profile: type[redis.Redis]
) -> None:
    client = profile(f"{lossy.url}&socket_timeout=1")
    client.ping()
    lossy.losing = True
    with pytest.raises(redis.TimeoutError):
        client.incr("asked")
    assert valkey.client().get("asked") == b"1"


def test_a_blocking_read_ends_before_its_socket_gives_up(own_valkey: ValkeyServer) -> None:
    client = consume(own_valkey.url)
    client.xgroup_create("stream", "group", mkstream=True)
    assert not client.xreadgroup("group", "me", {"stream": ">"}, block=LONGEST_BLOCK_MS)


def test_the_admin_client_asks_again_after_a_lost_reply(lossy: LossyProxy) -> None:
    client = admin(f"{lossy.url}&socket_timeout=1")
    client.ping()
    lossy.losing = True
    threading.Timer(0.1, setattr, (lossy, "losing", False)).start()
    assert client.ping()


def test_the_admin_client_survives_a_restart_of_the_server(own_valkey: ValkeyServer) -> None:
    client = admin(own_valkey.url)
    client.set("kept", "yes")
    own_valkey.kill_synced()
    own_valkey.start()
    assert client.get("kept") == b"yes"


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("unix:///run/v.sock?db=0", "redis+socket:///run/v.sock?virtual_host=1"),
        ("unix://me@/run/v.sock?db=0&password=a%2Fb", "redis+socket://me:a%2Fb@/run/v.sock?virtual_host=1"),
        ("redis://valkey:6379/0", "redis://valkey:6379/1"),
        ("redis://valkey:6379", "redis://valkey:6379/1"),
        ("rediss://:secret@valkey/0?db=3&ssl_ca_certs=ca.pem", "rediss://:secret@valkey/1?ssl_ca_certs=ca.pem"),
    ],
)
def test_the_broker_is_database_1_of_the_same_server(url: str, broker: str) -> None:
    assert celery_broker(url) == broker


def test_celery_reaches_the_broker_apart_from_the_feedback(valkey: ValkeyServer) -> None:
    with Connection(celery_broker(valkey.url)) as connection:
        queue = connection.SimpleQueue("jobs")
        queue.put({"job": 7})
        assert valkey.client().dbsize() == 0
        message = queue.get(timeout=5)
        assert message.payload == {"job": 7}
        message.ack()
        queue.close()
