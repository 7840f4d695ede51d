"""Lineage: what a training run started from, marks on versions, purges of a tenant, windows deleted for age.

Revision ID: 0002
Revises: 0001
"""

from alembic import op
import sqlalchemy as sa

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("training_run", sa.Column("inputs", sa.JSON(), nullable=True))
    op.add_column("training_run", sa.Column("machine", sa.JSON(), nullable=True))
    op.add_column("feedback_window", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "version_mark",
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "kind IN ('pinned', 'weights_deleted', 'withdrawn')", name=op.f("ck_version_mark_kind")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"], ["drafter_version.id"], name=op.f("fk_version_mark_version_id")
        ),
        sa.PrimaryKeyConstraint("version_id", "kind", name=op.f("pk_version_mark")),
    )
    op.create_table(
        "purge",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("withdraw", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('started', 'done')", name=op.f("ck_purge_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_purge")),
    )
    op.create_index(op.f("ix_purge_tenant"), "purge", ["tenant"], unique=False)
    op.create_table(
        "window_purge",
        sa.Column("purge_id", sa.Integer(), nullable=False),
        sa.Column("window_id", sa.Integer(), nullable=False),
        sa.Column("training", sa.Integer(), nullable=False),
        sa.Column("holdout", sa.Integer(), nullable=False),
        sa.Column("trained", sa.JSON(), nullable=False),
        sa.Column("before_sha256", sa.String(), nullable=False),
        sa.Column("after_sha256", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["purge_id"], ["purge.id"], name=op.f("fk_window_purge_purge_id")),
        sa.ForeignKeyConstraint(
            ["window_id"], ["feedback_window.id"], name=op.f("fk_window_purge_window_id")
        ),
        sa.PrimaryKeyConstraint("purge_id", "window_id", name=op.f("pk_window_purge")),
    )


def downgrade() -> None:
    op.drop_table("window_purge")
    op.drop_index(op.f("ix_purge_tenant"), table_name="purge")
    op.drop_table("purge")
    op.drop_table("version_mark")
    op.drop_column("feedback_window", "deleted_at")
    op.drop_column("training_run", "machine")
    op.drop_column("training_run", "inputs")
