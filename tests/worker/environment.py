"""What a trainer's process is told in these tests."""

from pathlib import Path

from tests.valkey_fixture import ValkeyServer


def trainer_environ(home: Path, database_url: str, valkey: ValkeyServer, target: Path) -> dict[str, str]:
    return {
        "REDRAFT_HOME": str(home),
        "REDRAFT_DATABASE_URL": database_url,
        "REDRAFT_REDIS_URL": valkey.url,
        "REDRAFT_TARGET": str(target),
        "REDRAFT_CACHE": str(home / "cache"),
    }
