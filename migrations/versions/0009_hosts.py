"""Hosts: what servers say of themselves and of their target; targets that changed under a drafter.

Revision ID: 0009
Revises: 0008
"""

from alembic import op
import sqlalchemy as sa

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("server", sa.Column("target_fingerprint", sa.String(), nullable=True))
    op.add_column("server", sa.Column("capabilities", sa.JSON(), nullable=True))
    op.create_table(
        "target_change",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("witness", sa.String(), nullable=False),
        sa.Column("seen_fingerprint", sa.String(), nullable=False),
        sa.Column("seen_by", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("witness IN ('server', 'records', 'trainer')", name=op.f("ck_target_change_witness")),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_target_change_drafter_id")),
        sa.PrimaryKeyConstraint("drafter_id", "witness", name=op.f("pk_target_change")),
    )
    op.create_table(
        "successor",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("predecessor_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_successor_drafter_id")),
        sa.ForeignKeyConstraint(["predecessor_id"], ["drafter.id"], name=op.f("fk_successor_predecessor_id")),
        sa.PrimaryKeyConstraint("drafter_id", name=op.f("pk_successor")),
    )
    op.create_index(op.f("ix_successor_predecessor_id"), "successor", ["predecessor_id"], unique=False)


def downgrade() -> None:
    op.drop_table("successor")
    op.drop_table("target_change")
    op.drop_column("server", "capabilities")
    op.drop_column("server", "target_fingerprint")
