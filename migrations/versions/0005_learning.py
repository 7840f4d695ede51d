"""Learning: what a training run replayed, how many passes it made, what the draft vocabulary covers, its moments.

Revision ID: 0005
Revises: 0004
"""

from typing import Any

from alembic import op
import sqlalchemy as sa

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS: tuple[tuple[str, Any], ...] = (
    ("passes", sa.Integer()),
    ("replayed", sa.Integer()),
    ("set_aside_losses", sa.JSON()),
    ("novelty", sa.Double()),
    ("mass_covered", sa.Double()),
    ("tokens_covered", sa.Double()),
    ("moments_sha256", sa.String()),
)


def upgrade() -> None:
    for name, kind in COLUMNS:
        op.add_column("training_run", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for name, _ in reversed(COLUMNS):
        op.drop_column("training_run", name)
