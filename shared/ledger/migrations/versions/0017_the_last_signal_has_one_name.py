"""A row's last signal that was in the log when it was trained on has the name that a batch's has."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.alter_column("experiences", "heard", new_column_name="last_signal")


def downgrade() -> None:
    op.alter_column("experiences", "last_signal", new_column_name="heard")
