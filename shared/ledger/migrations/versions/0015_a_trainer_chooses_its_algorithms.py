"""A trainer's row stores the algorithms that it chose."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("trainers", sa.Column("chosen", sa.LargeBinary))


def downgrade() -> None:
    op.drop_column("trainers", "chosen")
