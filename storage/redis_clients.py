"""The three ways redraft talks to Redis (or Valkey), in one place; nothing else calls `Redis.from_url`.

redis-py's own defaults (5 s, ten retries) let a frozen server hold a caller for half a minute, and write an
entry twice when its reply is lost. Each profile says how long it may wait and who tries again.
"""

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

LONGEST_BLOCK_MS = 2_000  # a blocking read must end well before its socket gives up
BROKER_DB = 1  # Celery's queues, apart from the feedback streams


def hot(url: str) -> redis.Redis:
    """For the serving process's feedback thread: 50 ms to connect, 200 ms to answer, never retried."""
    return redis.Redis.from_url(url, retry=None, socket_connect_timeout=0.05, socket_timeout=0.2)


def consume(url: str) -> redis.Redis:
    """For reading streams: after a lost reply the entries are pending under our name, so none is asked twice."""
    return redis.Redis.from_url(url, retry=None, socket_connect_timeout=1.0, socket_timeout=10.0)


def admin(url: str) -> redis.Redis:
    """For operators' commands and checks, all of them safe to repeat: 5 s, three retries."""
    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 3)
    return redis.Redis.from_url(url, retry=retry, socket_connect_timeout=1.0, socket_timeout=5.0)


def celery_broker(url: str) -> str:
    """The broker URL, as Celery spells it, of the same server's logical database 1."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        user = _credentials(parts.netloc, parts.query)
        return f"redis+socket://{user}{parts.path}?virtual_host={BROKER_DB}"
    options = [(name, value) for name, value in parse_qsl(parts.query) if name != "db"]
    return urlunsplit((parts.scheme, parts.netloc, f"/{BROKER_DB}", urlencode(options), ""))


def _credentials(netloc: str, query: str) -> str:
    """`user:password@` of a socket URL, whose password redis-py reads from the query."""
    password = dict(parse_qsl(query)).get("password")
    if password is None:
        return netloc
    return f"{netloc.rpartition('@')[0]}:{urlencode({'': password})[1:]}@"
