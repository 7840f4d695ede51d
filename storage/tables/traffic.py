"""How versions do on traffic: acceptance, drift, and the watch after a change."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from storage.schema import Base, one_of, unique_where


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


class WatchRow(Base):
    """One promotion's watch, or one canary's: whether the version is worse than the one whose share stays beside it."""

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
    share: Mapped[float]  # of the requests, that the predecessor serves
    canary: Mapped[bool | None]  # the predecessor is live; null, which is no, of watches before there were canaries
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
