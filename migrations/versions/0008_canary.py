"""Canaries: candidates that serve a share of the requests before they are promoted; their events and their watches.

Revision ID: 0008
Revises: 0007
"""

from collections.abc import Sequence

from alembic import op
import sqlalchemy as sa

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

BEFORE = ("init", "promote", "rollback")
AFTER = (*BEFORE, "canary", "recall")
CHECK = "ck_deployment_event_kind"


def upgrade() -> None:
    op.add_column("watch", sa.Column("canary", sa.Boolean(), nullable=True))
    _admit(AFTER)


def downgrade() -> None:
    op.execute("DELETE FROM watch_observation WHERE watch_id IN (SELECT id FROM watch WHERE canary)")
    op.execute("DELETE FROM watch WHERE canary")
    op.execute("UPDATE pointer SET canary_id = NULL")
    op.execute("DELETE FROM deployment_event WHERE kind IN ('canary', 'recall')")
    _admit(BEFORE)
    op.drop_column("watch", "canary")


def _admit(kinds: Sequence[str]) -> None:
    """Let events be of these kinds."""
    condition = "kind IN (" + ", ".join(f"'{kind}'" for kind in kinds) + ")"
    if op.get_context().dialect.name != "sqlite":
        op.drop_constraint(op.f(CHECK), "deployment_event", type_="check")
        op.create_check_constraint(op.f(CHECK), "deployment_event", condition)
        return
    with op.batch_alter_table("deployment_event", recreate="always") as copied:  # which leaves the old check behind
        copied.create_check_constraint(op.f(CHECK), condition)
