"""The tables, as typed SQLAlchemy mappings. Rows do not leave storage: see views, jobs, windows, history.

Times are UTC. Enumerations are strings under a check. A version is never edited; what state it is in follows
from the pointer, the evaluations and the events (`storage/views`).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, ForeignKeyConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from storage.schema import Base, one_of, unique_where


class DrafterRow(Base):
    __tablename__ = "drafter"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    target_fingerprint: Mapped[str]
    tokenizer_fingerprint: Mapped[str]
    config: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    retired_at: Mapped[datetime | None]


class VersionRow(Base):
    __tablename__ = "drafter_version"
    __table_args__ = (
        UniqueConstraint("drafter_id", "number"),
        UniqueConstraint("drafter_id", "id"),  # what the pointer's foreign keys refer to
        UniqueConstraint("parent_id", "window_id"),  # one update a window
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"))
    number: Mapped[int]
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("drafter_version.id"))
    window_id: Mapped[int | None] = mapped_column(ForeignKey("feedback_window.id"))
    weights_sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    drafter: Mapped[DrafterRow] = relationship(lazy="joined", innerjoin=True)
    parent: Mapped["VersionRow | None"] = relationship(remote_side=id, lazy="joined", join_depth=1)


class PointerRow(Base):
    """What a drafter serves. The composite keys keep it on versions of its own drafter, so of one target."""

    __tablename__ = "pointer"
    __table_args__ = tuple(
        ForeignKeyConstraint(["drafter_id", column], ["drafter_version.drafter_id", "drafter_version.id"])
        for column in ("live_id", "previous_id", "canary_id")
    )
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    live_id: Mapped[int]
    previous_id: Mapped[int | None]
    canary_id: Mapped[int | None]
    generation: Mapped[int]


class EventRow(Base):
    __tablename__ = "deployment_event"
    __table_args__ = (
        UniqueConstraint("drafter_id", "generation"),
        one_of("kind", ("init", "promote", "rollback")),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"))
    kind: Mapped[str]
    from_id: Mapped[int | None] = mapped_column(ForeignKey("drafter_version.id"))
    to_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"))
    generation: Mapped[int]
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


class IntervalRow(Base):
    __tablename__ = "live_interval"
    __table_args__ = (
        UniqueConstraint("drafter_id", "generation"),
        unique_where("uq_live_interval_open", "drafter_id", where="ended_at IS NULL"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"))
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"))
    generation: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class TrainingRow(Base):
    __tablename__ = "training_run"
    __table_args__ = (one_of("outcome", ("trained", "failed")),)
    id: Mapped[int] = mapped_column(primary_key=True)
    parent_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), index=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("feedback_window.id"))
    version_id: Mapped[int | None] = mapped_column(ForeignKey("drafter_version.id"), unique=True)
    seed: Mapped[int] = mapped_column(BigInteger)
    config: Mapped[dict[str, Any]]
    records: Mapped[int]
    positions: Mapped[int]
    steps: Mapped[int]
    first_loss: Mapped[float | None]  # null where the loss was not finite
    last_loss: Mapped[float | None]
    seconds: Mapped[float]
    outcome: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime]


class WindowRow(Base):
    __tablename__ = "feedback_window"
    __table_args__ = (
        one_of("state", ("open", "closed")),
        unique_where("uq_feedback_window_open", "drafter_id", where="state = 'open'"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"))
    sha256: Mapped[str]
    training: Mapped[int]
    holdout: Mapped[int]
    state: Mapped[str]
    outcome: Mapped[str]
    created_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class WindowRecordRow(Base):
    __tablename__ = "window_record"
    __table_args__ = (one_of("part", ("training", "holdout")),)
    record_id: Mapped[str] = mapped_column(primary_key=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("feedback_window.id"), index=True)
    part: Mapped[str]
    tenant: Mapped[str] = mapped_column(index=True)
    workload: Mapped[str]


class EvaluationRow(Base):
    __tablename__ = "evaluation"
    id: Mapped[int] = mapped_column(primary_key=True)
    candidate_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), unique=True)
    parent_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"))
    k: Mapped[int]
    requests: Mapped[int]
    scores: Mapped[list[Any]]  # WorkloadScore as objects, one a workload
    overall: Mapped[dict[str, Any]]
    promote: Mapped[bool]
    reason: Mapped[str]
    created_at: Mapped[datetime]


class AcceptanceRow(Base):
    """Counts of one minute. Drafter and version by name: traffic counts even where they are unknown."""

    __tablename__ = "acceptance_window"
    drafter: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    k: Mapped[int] = mapped_column(primary_key=True)
    bucket: Mapped[datetime] = mapped_column(primary_key=True)
    requests: Mapped[int]
    rounds: Mapped[int]
    proposed: Mapped[int]
    accepted: Mapped[int]
    histogram: Mapped[list[Any]]  # rounds by accepted count, 0 to k
    draft_ms: Mapped[float]
    verify_ms: Mapped[float]
    total_ms: Mapped[float]
    output_tokens: Mapped[int]


class FoldedRow(Base):
    __tablename__ = "folded_record"
    record_id: Mapped[str] = mapped_column(primary_key=True)
    folded_at: Mapped[datetime] = mapped_column(index=True)


class ServerRow(Base):
    __tablename__ = "server"
    id: Mapped[str] = mapped_column(primary_key=True)
    host_kind: Mapped[str]
    drafter: Mapped[str] = mapped_column(index=True)
    generation: Mapped[int]
    version: Mapped[int]
    error: Mapped[str]
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
