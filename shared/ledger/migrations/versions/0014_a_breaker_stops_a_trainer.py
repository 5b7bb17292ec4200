"""A trainer's row stores that its breaker has tripped, and the version from which it continues after a resume."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("trainers", sa.Column("tripped", sa.LargeBinary))
    op.add_column("trainers", sa.Column("resumed_version", sa.Integer))


def downgrade() -> None:
    op.drop_column("trainers", "resumed_version")
    op.drop_column("trainers", "tripped")
