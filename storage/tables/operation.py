"""What keeps the processes going: servers, jobs, messages, keys, and the audit log."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Mapped, mapped_column

from storage.schema import Base, one_of, unique_where


class ServerRow(Base):
    __tablename__ = "server"
    id: Mapped[str] = mapped_column(primary_key=True)
    host_kind: Mapped[str]
    drafter: Mapped[str] = mapped_column(index=True)
    generation: Mapped[int]
    version: Mapped[int]
    error: Mapped[str]
    target_fingerprint: Mapped[str | None]  # null, as the next, where the server does not say
    capabilities: Mapped[dict[str, Any] | None]  # Capabilities as an object
    started_at: Mapped[datetime]
    last_seen: Mapped[datetime]


class JobRow(Base):
    __tablename__ = "job"
    __table_args__ = (
        one_of("state", ("queued", "running", "done", "failed")),
        unique_where("uq_job_open", "kind", "drafter", where="state IN ('queued', 'running')"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    drafter: Mapped[str]  # name; empty for jobs that concern none
    state: Mapped[str]
    fence: Mapped[int]  # grows with every lease; a write with an older one is refused
    attempts: Mapped[int]
    holder: Mapped[str]
    lease_until: Mapped[datetime | None]
    reason: Mapped[str]
    created_at: Mapped[datetime]
    touched_at: Mapped[datetime]


class OutboxRow(Base):
    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    sent_at: Mapped[datetime | None] = mapped_column(index=True)


class ApiKeyRow(Base):
    __tablename__ = "api_key"
    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditRow(Base):
    __tablename__ = "audit_log"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    before: Mapped[dict[str, Any]]
    after: Mapped[dict[str, Any]]
    reason: Mapped[str]
    previous_hash: Mapped[str] = mapped_column(unique=True)  # a chain cannot fork
    hash: Mapped[str]
