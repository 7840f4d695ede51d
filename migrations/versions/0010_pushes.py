"""Pushes: each step of a push of weights into a running engine, so that one that was cut off can be put right.

Revision ID: 0010
Revises: 0009
"""

from alembic import op
import sqlalchemy as sa

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

STATES = (
    "pushing", "paused", "loaded", "verified", "active", "refused", "restoring", "restored", "off", "unknown",
)


def upgrade() -> None:
    op.create_table(
        "push_step",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=True),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN (" + ", ".join(f"'{s}'" for s in STATES) + ")", name=op.f("ck_push_step_state")),
        sa.ForeignKeyConstraint(["version_id"], ["drafter_version.id"], name=op.f("fk_push_step_version_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_push_step")),
    )
    op.create_index(op.f("ix_push_step_endpoint"), "push_step", ["endpoint"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_push_step_endpoint"), table_name="push_step")
    op.drop_table("push_step")
