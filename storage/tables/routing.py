"""Which drafter serves which workload, and the weights behind it."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from storage.schema import Base, one_of


class RoutingRow(Base):
    """How often the routes of a target have changed, so that a server sees a change by one number; and who is general.

    That is noted with the first route, when there is one drafter that it does not name.
    """

    __tablename__ = "routing"
    target_fingerprint: Mapped[str] = mapped_column(primary_key=True)
    generation: Mapped[int]
    general_id: Mapped[int | None] = mapped_column(ForeignKey("drafter.id"))


class RouteRow(Base):
    """The drafter that proposes for a workload; a workload without a row has the general one."""

    __tablename__ = "route"
    __table_args__ = (one_of("cause", ("manual", "learned", "novel")),)
    target_fingerprint: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(primary_key=True)
    drafter_id: Mapped[int | None] = mapped_column(ForeignKey("drafter.id"), index=True)  # null: the general one
    cause: Mapped[str]
    actor: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


class OwnDrafterRow(Base):
    """A drafter that routing made for one workload, as a copy of the general drafter's live version, its parent."""

    __tablename__ = "own_drafter"
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    workload: Mapped[str]
    at: Mapped[datetime]


class StandingRow(Base):
    """How one drafter does on one workload: its weight, and what it reached on the logged text."""

    __tablename__ = "routing_standing"
    target_fingerprint: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(primary_key=True)
    drafter_id: Mapped[int] = mapped_column(ForeignKey("drafter.id"), primary_key=True)
    version: Mapped[int]  # number, as last scored
    weight: Mapped[float]  # of the workload's drafters; they sum to 1
    scores: Mapped[dict[str, Any]]  # acceptance probability: by policy, Score as an object
    scored: Mapped[int]  # requests in all
    at: Mapped[datetime]


class ScoredWindowRow(Base):
    """A window whose requests are in the standings."""

    __tablename__ = "scored_window"
    window_id: Mapped[int] = mapped_column(ForeignKey("feedback_window.id"), primary_key=True)
    at: Mapped[datetime]
