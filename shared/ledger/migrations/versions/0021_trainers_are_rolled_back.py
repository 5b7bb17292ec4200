"""A trainer's row counts how often an operator has returned it to an earlier version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("trainers", sa.Column("rollbacks", sa.Integer, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.drop_column("trainers", "rollbacks")
