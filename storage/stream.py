"""The feedback stream: finished requests on their way from the servers to the worker, in Redis.

Appended by `service/feedback`, read by two consumer groups that each see every entry. Delivery is at least
once: an entry comes again until it is acknowledged, which callers do only after the SQL commit that stores
it. The stream is bounded by length and by age, so entries can vanish unread; each one that did is counted.
Commands of Redis 7.0 only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError

from storage.redis_clients import LONGEST_BLOCK_MS

ADAPT = "adapt"  # the group of worker/collect
HISTORY = "history"  # the group of storage/history
QUARANTINE_LENGTH = 1_000
FIND_BATCH = 500
COUNTED = 1_000  # entries counted one by one where the server cannot tell how many are unread
RECORD = b"b"  # the field that holds an encoded FeedbackRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Waiting:
    """What a group has not acknowledged yet."""

    count: int
    oldest_age_seconds: float  # 0.0 where nothing waits


@dataclass(frozen=True)
class Batch:
    entries: tuple[tuple[bytes, bytes], ...]  # (entry id, encoded record), oldest first
    lost: int  # trimmed off the stream before this group could read or acknowledge them


class FeedbackStream:
    """One drafter's stream. `length` and `retention_hours` bound what is kept, read or not."""

    def __init__(self, client: redis.Redis, drafter: str, length: int = 20_000, retention_hours: float = 24.0) -> None:
        self.client = client
        self.key = f"redraft:{drafter}:feedback"
        self.quarantine_key = f"redraft:{drafter}:quarantine"
        self.seen_key = f"redraft:{drafter}:seen"  # how far `newest` has looked
        self.length = length
        self.retention_hours = retention_hours

    def append(self, records: Sequence[bytes]) -> list[ResponseError]:
        """Add encoded records in one round trip; returns the server's refusals, one for each record refused.

        Raises `redis.ConnectionError` or `redis.TimeoutError`: then any of them may have been added.
        """
        with self.client.pipeline(transaction=False) as pipeline:
            for data in records:
                pipeline.xadd(self.key, {RECORD: data}, maxlen=self.length, approximate=True)
            pipeline.xtrim(self.key, minid=self._oldest_id(), approximate=True)
            replies = pipeline.execute(raise_on_error=False)[:-1]
        for reply in replies:
            if isinstance(reply, redis.ConnectionError):  # still loading its data: come again later
                raise reply
        return [reply for reply in replies if isinstance(reply, ResponseError)]

    def trim(self) -> int:
        """Drop what is past its age from both streams to the entry (`append` rounds up to whole nodes)."""
        keys = (self.key, self.quarantine_key)
        return sum(int(self.client.xtrim(key, minid=self._oldest_id(), approximate=False)) for key in keys)

    def waiting(self, group: str) -> Waiting:
        """How much `group` has to read or acknowledge, and how old the oldest of it is."""
        return self._with_group(group, lambda: self._waiting(group))

    def read(self, group: str, consumer: str, count: int, block_ms: int = 0, idle_ms: int = 60_000) -> Batch:
        """At most `count` entries: what `consumer` holds unacknowledged, what others left, then new ones.

        Other consumers' entries are taken over after `idle_ms`. Waits up to `block_ms` (at most
        `LONGEST_BLOCK_MS`; 0: not at all) when there is nothing. Unacknowledged entries come again each time.
        """
        return self._with_group(group, lambda: self._read(group, consumer, count, block_ms, idle_ms))

    def acknowledge(self, group: str, ids: Sequence[bytes]) -> int:
        """Say that these are stored; returns how many were still pending."""
        return int(self.client.xack(self.key, group, *ids)) if ids else 0

    def quarantine(self, entry_id: bytes, data: bytes, reason: str) -> None:
        """Keep an unusable record aside, under the same retention; the caller acknowledges it."""
        fields: dict[Any, Any] = {b"id": entry_id, RECORD: data, b"reason": reason}
        self.client.xadd(self.quarantine_key, fields, maxlen=QUARANTINE_LENGTH, approximate=True)

    def find(self, wanted: Callable[[bytes], bool]) -> dict[str, list[bytes]]:
        """The ids of the entries of stream and quarantine, by their key, whose record is wanted; read or not."""
        found: dict[str, list[bytes]] = {self.key: [], self.quarantine_key: []}
        for key, ids in found.items():
            after = b"-"
            while batch := self._after(key, after, FIND_BATCH):
                ids += [entry_id for entry_id, fields in batch if wanted(fields.get(RECORD, b""))]
                after = b"(" + batch[-1][0]
        return found

    def delete(self, found: dict[str, list[bytes]]) -> int:
        """Delete these entries, whoever has read them; how many were still there."""
        deleted = 0
        for key, ids in found.items():
            for start in range(0, len(ids), FIND_BATCH):
                some = ids[start : start + FIND_BATCH]
                for group in (ADAPT, HISTORY):  # so that nobody waits for them, nor counts them as lost
                    self.client.xack(key, group, *some)
                deleted += int(self.client.xdel(key, *some))
        return deleted

    def _after(self, key: str, start: bytes, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: Any = self.client.xrange(key, min=start, count=count)
        return list(found)

    def newest(self, count: int) -> tuple[bytes, ...]:
        """Up to `count` of the newest records that came since the last such call, by whomever, oldest first.

        A sample for whoever cannot look at everything: no group, nothing to acknowledge, and what is missed is missed.
        """
        mark: Any = self.client.get(self.seen_key)
        found: Any = self.client.xrevrange(self.key, min=b"(" + mark if mark else "-", count=count)
        if found:
            self.client.set(self.seen_key, found[0][0])
        return tuple(fields.get(RECORD, b"") for _, fields in reversed(found))

    def _oldest_id(self) -> str:
        # The server's clock stamps the entries, ours judges them: hosts are assumed to agree within minutes.
        return f"{max(0, int((time.time() - self.retention_hours * 3600) * 1000))}-0"

    def _with_group(self, group: str, action: Callable[[], T]) -> T:
        """Run `action`; where the group is gone (first use, or Redis was wiped), make it and run it again."""
        try:
            return action()
        except ResponseError as error:
            if not any(sign in str(error) for sign in ("NOGROUP", "no such key")):
                raise
        self._create(group)
        return action()

    def _create(self, group: str) -> None:
        try:
            # Nothing read yet, said outright: the server then knows what was trimmed before it was read.
            self.client.xgroup_create(self.key, group, id="0", mkstream=True, entries_read=0)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _group(self, groups: Sequence[dict[str, Any]], group: str) -> dict[str, Any]:
        for info in groups:
            if info["name"] in (group, group.encode()):
                return info
        raise ResponseError(f"NOGROUP {group} of {self.key}")

    def _waiting(self, group: str) -> Waiting:
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_groups(self.key)
            pipeline.xlen(self.key)
            pipeline.xpending(self.key, group)
            groups, length, pending = pipeline.execute()
        info = self._group(groups, group)
        count = int(pending["pending"]) + self._unread(info, length)
        # Entries pending may be trimmed: the oldest that still exists is never older than the stream's first.
        oldest = pending["min"] if pending["pending"] else self._first_after(info["last-delivered-id"])
        return Waiting(count, _age(oldest) if count and oldest else 0.0)

    def _unread(self, info: dict[str, Any], length: int) -> int:
        """Entries never delivered. After deletions the server knows no lag: they are counted, up to a bound."""
        if info["lag"] is not None:
            return min(int(info["lag"]), length)
        counted = len(self._after(self.key, b"(" + info["last-delivered-id"], COUNTED))
        return counted if counted < COUNTED else length

    def _first_after(self, entry_id: bytes) -> bytes | None:
        found: Any = self.client.xrange(self.key, min=b"(" + entry_id, count=1)
        return found[0][0] if found else None

    def _read(self, group: str, consumer: str, count: int, block_ms: int, idle_ms: int) -> Batch:
        entries, lost = self._held(group, consumer, count)
        if len(entries) < count:
            claimed, gone = self._left_by_others(group, consumer, count - len(entries), idle_ms)
            entries, lost = entries | claimed, lost + gone
        if len(entries) < count:
            wait = block_ms if not entries else 0
            fresh, gone = self._fresh(group, consumer, count - len(entries), wait)
            entries, lost = entries | fresh, lost + gone
        return Batch(tuple(entries.items()), lost)

    def _held(self, group: str, consumer: str, count: int) -> tuple[dict[bytes, bytes], int]:
        """Our own unacknowledged entries; those trimmed meanwhile come as empty and are acknowledged here."""
        entries: dict[bytes, bytes] = {}
        lost, after = 0, b"0"
        while len(entries) < count:
            found = _entries(self.client.xreadgroup(group, consumer, {self.key: after}, count=count - len(entries)))
            if not found:
                break
            after = found[-1][0]
            gone = [entry_id for entry_id, fields in found if not fields]
            lost += self.acknowledge(group, gone)
            entries |= {entry_id: fields.get(RECORD, b"") for entry_id, fields in found if fields}
        return entries, lost

    def _left_by_others(self, group: str, consumer: str, count: int, idle_ms: int) -> tuple[dict[bytes, bytes], int]:
        """Entries that a consumer which died, or whose reply was lost, never acknowledged."""
        entries: dict[bytes, bytes] = {}
        lost, cursor = 0, b"0-0"
        while len(entries) < count:
            cursor, found, gone = self.client.xautoclaim(
                self.key, group, consumer, idle_ms, cursor, count=count - len(entries)
            )
            lost += len(gone)
            entries |= {entry_id: fields.get(RECORD, b"") for entry_id, fields in found}
            if cursor == b"0-0":
                break
        return entries, lost

    def _fresh(self, group: str, consumer: str, count: int, block_ms: int) -> tuple[dict[bytes, bytes], int]:
        """New entries, and how many were trimmed before anybody of this group had read them.

        Where all were trimmed, the loss shows with the next entry.
        """
        with self.client.pipeline(transaction=True) as pipeline:  # atomic: the count belongs to this read
            pipeline.xinfo_groups(self.key)
            pipeline.xlen(self.key)
            pipeline.xreadgroup(group, consumer, {self.key: ">"}, count=count)
            groups, length, reply = pipeline.execute()
        lag = self._group(groups, group)["lag"]
        trimmed = max(0, lag - length) if lag is not None else 0
        if block_ms > 0 and not reply:
            wait = min(block_ms, LONGEST_BLOCK_MS)
            reply = self.client.xreadgroup(group, consumer, {self.key: ">"}, count=count, block=wait)
        return {entry_id: fields.get(RECORD, b"") for entry_id, fields in _entries(reply)}, trimmed if reply else 0


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREADGROUP reply for one stream, in either protocol's form."""
    if not reply:
        return []
    streams = reply.items() if isinstance(reply, dict) else reply
    ((_, entries),) = streams
    return list(entries)


def _age(entry_id: bytes) -> float:
    return max(0.0, time.time() - int(entry_id.split(b"-")[0]) / 1000)
