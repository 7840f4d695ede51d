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


class MarkRow(Base):
    """What holds of a version from some moment on, as versions themselves are never edited (`storage/marks`)."""

    __tablename__ = "version_mark"
    __table_args__ = (one_of("kind", ("pinned", "weights_deleted", "withdrawn")),)
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


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
    inputs: Mapped[dict[str, Any] | None]  # TrainingInputs as an object; null of runs before they were kept
    machine: Mapped[dict[str, Any] | None]  # what the bits of a result depend on besides
    records: Mapped[int]
    positions: Mapped[int]
    steps: Mapped[int]
    passes: Mapped[int | None]  # null, as other figures below, of runs before they were kept
    replayed: Mapped[int | None]  # of the records, those of earlier windows
    first_loss: Mapped[float | None]  # null where the loss was not finite
    last_loss: Mapped[float | None]
    set_aside_losses: Mapped[list[Any] | None]
    novelty: Mapped[float | None]
    mass_covered: Mapped[float | None]
    tokens_covered: Mapped[float | None]
    moments_sha256: Mapped[str | None]  # null where the optimiser's moments were not kept
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
    deleted_at: Mapped[datetime | None]  # its file was deleted, for its age
    cause: Mapped[str | None]  # why the update started; null of windows from before it was kept, as the next
    left_out: Mapped[dict[str, Any] | None]  # records by the guard that left them out


class WindowRecordRow(Base):
    __tablename__ = "window_record"
    __table_args__ = (one_of("part", ("training", "holdout")),)
    record_id: Mapped[str] = mapped_column(primary_key=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("feedback_window.id"), index=True)
    part: Mapped[str]
    tenant: Mapped[str] = mapped_column(index=True)
    workload: Mapped[str]


class PurgeRow(Base):
    """A tenant's records were, or are being, deleted; those that finished before `started_at` never come back."""

    __tablename__ = "purge"
    __table_args__ = (one_of("state", ("started", "done")),)
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(index=True)
    actor: Mapped[str]
    withdraw: Mapped[bool]  # whether the versions trained on the records are withdrawn too
    state: Mapped[str]
    counts: Mapped[dict[str, Any]]  # what was deleted where
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class WindowPurgeRow(Base):
    """A window's file was written again without a tenant's records."""

    __tablename__ = "window_purge"
    purge_id: Mapped[int] = mapped_column(ForeignKey("purge.id"), primary_key=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("feedback_window.id"), primary_key=True)
    training: Mapped[int]  # records taken out
    holdout: Mapped[int]
    trained: Mapped[dict[str, Any]]  # version id: how many of the records taken out it was trained on
    before_sha256: Mapped[str]
    after_sha256: Mapped[str]
    at: Mapped[datetime]


class LeftOutRow(Base):
    """How many records each guard has kept out of all windows, whether a window came of the rest or not."""

    __tablename__ = "left_out"
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    guard: Mapped[str] = mapped_column(primary_key=True)
    records: Mapped[int] = mapped_column(BigInteger)
    reason: Mapped[str]  # of the newest one
    at: Mapped[datetime]


class DriftSeriesRow(Base):
    """Where the change detector of a workload and policy stands; a bounded number a drafter."""

    __tablename__ = "drift_series"
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    workload: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    requests: Mapped[int]
    state: Mapped[dict[str, Any]]
    last_seen: Mapped[datetime]


class DriftAlarmRow(Base):
    __tablename__ = "drift_alarm"
    __table_args__ = (one_of("kind", ("fall", "novel")),)
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), index=True)
    kind: Mapped[str]
    workload: Mapped[str]
    policy: Mapped[str]
    version: Mapped[int]
    before: Mapped[float | None]  # acceptance probability; null of a novel workload
    after: Mapped[float | None]
    requests: Mapped[int]
    reason: Mapped[str]
    at: Mapped[datetime]
    window_id: Mapped[int | None] = mapped_column(ForeignKey("feedback_window.id"), index=True)  # null: awaits one


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


class WatchRow(Base):
    """One promotion's watch: whether the version is worse than the one before it, with the share that stays there."""

    __tablename__ = "watch"
    __table_args__ = (
        UniqueConstraint("drafter_id", "generation"),
        one_of("state", ("open", "safe", "worse", "ended", "overtaken")),
        unique_where("uq_watch_open", "drafter_id", where="state = 'open'"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"))
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"))
    predecessor_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"))
    generation: Mapped[int]
    share: Mapped[float]
    state: Mapped[str]
    reason: Mapped[str]
    requests: Mapped[int]  # that the findings are about
    findings: Mapped[list[Any]]  # objects, one a workload, policy and figure
    opened_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class ObservationRow(Base):
    """A request as an open watch saw it; in the order of its ids, and gone when the watch is closed."""

    __tablename__ = "watch_observation"
    id: Mapped[int] = mapped_column(primary_key=True)
    watch_id: Mapped[int] = mapped_column(ForeignKey("watch.id"), index=True)
    workload: Mapped[str]
    policy: Mapped[str]
    held: Mapped[bool]
    strayed: Mapped[bool]
    proposed: Mapped[int]
    accepted: Mapped[int]
    tokens: Mapped[int]
    ms: Mapped[float]


class QuarantineRow(Base):
    """A version that was taken back for being worse: no worker promotes it again."""

    __tablename__ = "quarantine"
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), primary_key=True)
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


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
