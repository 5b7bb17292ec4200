"""A row's last signal at the time of its training is named as in a batch."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.alter_column("experiences", "heard", new_column_name="last_signal")


def downgrade() -> None:
    op.alter_column("experiences", "last_signal", new_column_name="heard")
