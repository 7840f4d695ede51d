"""What a training run learnt from: rows as serving logged them, or records that the target scored again.

Revision ID: 0007
Revises: 0006
"""

from alembic import op
import sqlalchemy as sa

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("training_run", sa.Column("teacher", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("training_run", "teacher")
