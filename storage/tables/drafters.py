"""Drafters and their versions: what there is, what is live and was, and what was decided about each."""

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


class TargetChangeRow(Base):
    """A drafter's target is served no more: another one was seen in its place. Gone when the old one is back."""

    __tablename__ = "target_change"
    __table_args__ = (one_of("witness", ("server", "records", "trainer")),)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    witness: Mapped[str] = mapped_column(primary_key=True)
    seen_fingerprint: Mapped[str]
    seen_by: Mapped[str]
    at: Mapped[datetime]


class SuccessorRow(Base):
    """A drafter that was made to go on from another one, whose target had changed."""

    __tablename__ = "successor"
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    predecessor_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), index=True)


class MarkRow(Base):
    """What holds of a version from some moment on, as versions themselves are never edited (`storage/marks`)."""

    __tablename__ = "version_mark"
    __table_args__ = (one_of("kind", ("pinned", "weights_deleted", "withdrawn")),)
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


class QuarantineRow(Base):
    """A version that was taken back for being worse: no worker promotes it again."""

    __tablename__ = "quarantine"
    version_id: Mapped[int] = mapped_column(ForeignKey("drafter_version.id"), primary_key=True)
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
        one_of("kind", ("init", "promote", "rollback", "canary", "recall")),
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
