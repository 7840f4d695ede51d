"""Feedback on its way to a window: distinct sound records, and stream entries of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from storage.records import FeedbackRecord, encode, int32
from storage.registry import Drafter, Registry
from tests.storage.rows import make_drafter, make_record

VOCABULARY = 1000


def chat(registry: Registry) -> Drafter:
    make_drafter(registry)
    return registry.drafter("chat")


def said(number: int, **changes: Any) -> FeedbackRecord:
    """A sound record of its own: prompt and output are like no other number's."""
    own = {"prompt_ids": int32([number % VOCABULARY, number // VOCABULARY, 3])}
    return msgspec.structs.replace(make_record(f"r{number}"), **(own | changes))


def entries(records: Iterable[FeedbackRecord]) -> list[tuple[bytes, bytes]]:
    return [(f"{n}-0".encode(), encode(record)) for n, record in enumerate(records)]


def copies(record: FeedbackRecord, count: int) -> list[FeedbackRecord]:
    """The same prompt and output in requests of their own."""
    return [
        msgspec.structs.replace(record, record_id=f"{record.record_id}-{n}", request_id=f"{record.request_id}-{n}")
        for n in range(count)
    ]


def ids(records: Sequence[FeedbackRecord]) -> list[str]:
    return [record.record_id for record in records]
