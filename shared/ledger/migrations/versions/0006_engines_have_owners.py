"""The explorer with an engine's lease is called its owner."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

RENAMED = {"keeper": "owner", "keeper_until": "owner_until"}


def upgrade() -> None:
    for before, after in RENAMED.items():
        op.execute(f"ALTER TABLE engines RENAME COLUMN {before} TO {after}")  # the same on SQLite and PostgreSQL


def downgrade() -> None:
    for before, after in RENAMED.items():
        op.execute(f"ALTER TABLE engines RENAME COLUMN {after} TO {before}")
