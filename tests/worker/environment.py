"""What a trainer's process is told in these tests, and what it finds to do."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from sqlalchemy import Engine

from adapter.target import Target
from adapter.versions import Versions
from storage.jobs import Jobs
from storage.records import FeedbackRecord, encode
from storage.redis_clients import consume
from storage.stream import FeedbackStream
from tests.circle import make_drafter, tiny_first
from tests.valkey_fixture import ValkeyServer


def trainer_environ(home: Path, database_url: str, valkey: ValkeyServer, target: Path) -> dict[str, str]:
    return {
        "REDRAFT_HOME": str(home),
        "REDRAFT_DATABASE_URL": database_url,
        "REDRAFT_REDIS_URL": valkey.url,
        "REDRAFT_TARGET": str(target),
        "REDRAFT_CACHE": str(home / "cache"),
    }


def due_update(
    target: Target, database: Engine, versions: Versions, valkey: ValkeyServer, records: Sequence[FeedbackRecord]
) -> int:
    """A job for a drafter `demo` of the target, whose stream has these records; the job's id."""
    make_drafter(target, database, versions, tiny_first(target))
    with consume(valkey.url) as redis:
        FeedbackStream(redis, "demo").append([encode(msgspec.structs.replace(r, drafter="demo")) for r in records])
    job = Jobs(database).request("adapt", "demo")
    assert job is not None
    return job.id
