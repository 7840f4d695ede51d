"""What drafters learn from: windows of records, training runs, and what was left out or purged."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from storage.schema import Base, one_of, unique_where


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
    teacher: Mapped[str | None]  # logged or rescored; null, which is logged, of runs before it was kept
    seconds: Mapped[float]
    outcome: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime]


class LeftOutRow(Base):
    """How many records each guard has kept out of all windows, whether a window came of the rest or not."""

    __tablename__ = "left_out"
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    guard: Mapped[str] = mapped_column(primary_key=True)
    records: Mapped[int] = mapped_column(BigInteger)
    reason: Mapped[str]  # of the newest one
    at: Mapped[datetime]


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
