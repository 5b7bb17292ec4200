"""Each explorer stores the settings in which all explorers of a ledger must agree."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("explorers", sa.Column("settings", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("explorers", "settings")
