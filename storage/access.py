"""API keys: who may move the pointer. The database knows a key's sha256 only; the operator has it in a file.

At its first start a server makes the operator's key and writes it to `<home>/operator.key`, readable by its
owner only. Operator routes check every request with `verify`.
"""

import hmac
import os
import secrets
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from sqlalchemy import Engine, select

from storage import audit
from storage.database import exclusive, now, reading, transaction
from storage.tables import ApiKeyRow

KEY_FILE = "operator.key"
PREFIX = "rdk_"
OPERATOR = "operator"
KEYS_LOCK = 0x7265647261667404  # see database.exclusive
USE_NOTED_EVERY = timedelta(minutes=1)


def ensure_operator_key(engine: Engine, home: Path) -> Path | None:
    """Make the first operator key and return its file; None where there is a key already."""
    with transaction(engine) as session:
        exclusive(session, KEYS_LOCK)
        if session.scalar(select(ApiKeyRow.id).where(ApiKeyRow.role == OPERATOR, ApiKeyRow.revoked_at.is_(None))):
            return None
        key = PREFIX + secrets.token_urlsafe(32)
        session.add(ApiKeyRow(sha256=_digest(key), role=OPERATOR, created_at=now(session)))
        audit.append(session, "redraft", "key.create", f"role/{OPERATOR}", {}, {"sha256": _digest(key)}, "first start")
        return _write_private(home / KEY_FILE, key)


def verify(engine: Engine, key: str) -> str | None:
    """The role of a key, or None where it is not one (any more). Compares digests in constant time."""
    digest = _digest(key)
    with reading(engine) as session:
        row = session.scalar(select(ApiKeyRow).where(ApiKeyRow.sha256 == digest, ApiKeyRow.revoked_at.is_(None)))
        if row is None or not hmac.compare_digest(row.sha256, digest):
            return None
        stale = row.last_used_at is None or now(session) - row.last_used_at > USE_NOTED_EVERY
        identity, role = row.id, row.role
    if stale:
        _note_use(engine, identity)
    return role


def _note_use(engine: Engine, key_id: int) -> None:
    with transaction(engine) as session:
        session.get_one(ApiKeyRow, key_id).last_used_at = now(session)


def _digest(key: str) -> str:
    """A key has 256 random bits, so a plain hash cannot be searched."""
    return sha256(key.encode()).hexdigest()


def _write_private(path: Path, key: str) -> Path:
    """Write whole or not at all, never readable by others, not even for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return path
