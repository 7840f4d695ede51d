"""The watch after a promotion: watches, what they see of requests, and the quarantine.

Revision ID: 0003
Revises: 0002
"""

from alembic import op
import sqlalchemy as sa

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "watch",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("predecessor_id", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('open', 'safe', 'worse', 'ended', 'overtaken')", name=op.f("ck_watch_state")
        ),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_watch_drafter_id")),
        sa.ForeignKeyConstraint(["version_id"], ["drafter_version.id"], name=op.f("fk_watch_version_id")),
        sa.ForeignKeyConstraint(
            ["predecessor_id"], ["drafter_version.id"], name=op.f("fk_watch_predecessor_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_watch")),
        sa.UniqueConstraint("drafter_id", "generation", name=op.f("uq_watch_drafter_id_generation")),
    )
    op.create_index(
        "uq_watch_open",
        "watch",
        ["drafter_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "watch_observation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("watch_id", sa.Integer(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("strayed", sa.Boolean(), nullable=False),
        sa.Column("proposed", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("ms", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["watch_id"], ["watch.id"], name=op.f("fk_watch_observation_watch_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_watch_observation")),
    )
    op.create_index(op.f("ix_watch_observation_watch_id"), "watch_observation", ["watch_id"], unique=False)
    op.create_table(
        "quarantine",
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["version_id"], ["drafter_version.id"], name=op.f("fk_quarantine_version_id")),
        sa.PrimaryKeyConstraint("version_id", name=op.f("pk_quarantine")),
    )


def downgrade() -> None:
    op.drop_table("quarantine")
    op.drop_index(op.f("ix_watch_observation_watch_id"), table_name="watch_observation")
    op.drop_table("watch_observation")
    op.drop_index("uq_watch_open", table_name="watch")
    op.drop_table("watch")
