"""Routing: which drafter proposes for which workload, drafters of their own, and how each does on each workload.

Revision ID: 0006
Revises: 0005
"""

from alembic import op
import sqlalchemy as sa

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "routing",
        sa.Column("target_fingerprint", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("general_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["general_id"], ["drafter.id"], name=op.f("fk_routing_general_id")),
        sa.PrimaryKeyConstraint("target_fingerprint", name=op.f("pk_routing")),
    )
    op.create_table(
        "route",
        sa.Column("target_fingerprint", sa.String(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=True),
        sa.Column("cause", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("cause IN ('manual', 'learned', 'novel')", name=op.f("ck_route_cause")),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_route_drafter_id")),
        sa.PrimaryKeyConstraint("target_fingerprint", "workload", name=op.f("pk_route")),
    )
    op.create_index(op.f("ix_route_drafter_id"), "route", ["drafter_id"], unique=False)
    op.create_table(
        "own_drafter",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_own_drafter_drafter_id")),
        sa.PrimaryKeyConstraint("drafter_id", name=op.f("pk_own_drafter")),
    )
    op.create_table(
        "routing_standing",
        sa.Column("target_fingerprint", sa.String(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("scored", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_routing_standing_drafter_id")),
        sa.PrimaryKeyConstraint("target_fingerprint", "workload", "drafter_id", name=op.f("pk_routing_standing")),
    )
    op.create_table(
        "scored_window",
        sa.Column("window_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["window_id"], ["feedback_window.id"], name=op.f("fk_scored_window_window_id")),
        sa.PrimaryKeyConstraint("window_id", name=op.f("pk_scored_window")),
    )


def downgrade() -> None:
    op.drop_table("scored_window")
    op.drop_table("routing_standing")
    op.drop_table("own_drafter")
    op.drop_index(op.f("ix_route_drafter_id"), table_name="route")
    op.drop_table("route")
    op.drop_table("routing")
