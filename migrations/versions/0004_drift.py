"""Drift: detectors by workload and their alarms; why a window was started, and what the guards left out of it.

Revision ID: 0004
Revises: 0003
"""

from alembic import op
import sqlalchemy as sa

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("feedback_window", sa.Column("cause", sa.String(), nullable=True))
    op.add_column("feedback_window", sa.Column("left_out", sa.JSON(), nullable=True))
    op.create_table(
        "left_out",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("guard", sa.String(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_left_out_drafter_id")),
        sa.PrimaryKeyConstraint("drafter_id", "guard", name=op.f("pk_left_out")),
    )
    op.create_table(
        "drift_series",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_drift_series_drafter_id")),
        sa.PrimaryKeyConstraint("drafter_id", "workload", "policy", name=op.f("pk_drift_series")),
    )
    op.create_table(
        "drift_alarm",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("before", sa.Double(), nullable=True),
        sa.Column("after", sa.Double(), nullable=True),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("window_id", sa.Integer(), nullable=True),
        sa.CheckConstraint("kind IN ('fall', 'novel')", name=op.f("ck_drift_alarm_kind")),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_drift_alarm_drafter_id")),
        sa.ForeignKeyConstraint(["window_id"], ["feedback_window.id"], name=op.f("fk_drift_alarm_window_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drift_alarm")),
    )
    op.create_index(op.f("ix_drift_alarm_drafter_id"), "drift_alarm", ["drafter_id"], unique=False)
    op.create_index(op.f("ix_drift_alarm_window_id"), "drift_alarm", ["window_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_drift_alarm_window_id"), table_name="drift_alarm")
    op.drop_index(op.f("ix_drift_alarm_drafter_id"), table_name="drift_alarm")
    op.drop_table("drift_alarm")
    op.drop_table("drift_series")
    op.drop_table("left_out")
    op.drop_column("feedback_window", "left_out")
    op.drop_column("feedback_window", "cause")
