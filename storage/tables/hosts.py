"""What was done to production engines that hold a drafter's weights themselves."""

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from storage.schema import Base, one_of

PUSH_STATES = (
    "pushing", "paused", "loaded", "verified", "active", "refused", "restoring", "restored", "off", "unknown",
)  # fmt: skip


class PushStepRow(Base):
    """A step of a push of weights into a running engine; never edited. The newest one of an endpoint is its state."""

    __tablename__ = "push_step"
    __table_args__ = (one_of("state", PUSH_STATES),)
    id: Mapped[int] = mapped_column(primary_key=True)
    endpoint: Mapped[str] = mapped_column(index=True)
    engine: Mapped[str]  # another after each start of the engine
    state: Mapped[str]
    label: Mapped[str]  # what the engine calls these weights
    version_id: Mapped[int | None] = mapped_column(ForeignKey("drafter_version.id"))  # null: what it started with
    checkpoint: Mapped[str]  # file
    sha256: Mapped[str]
    target: Mapped[str]  # fingerprint of the target before the push
    detail: Mapped[str]
    at: Mapped[datetime]
