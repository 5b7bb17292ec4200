"""PostgreSQL no longer checks, for each claimed row, that its batch exists: the same statement creates it.

The check used a plan cached when there were few batches, which scanned all of them: claims became slower until the next
ANALYZE. SQLite looks batches up by their key, and keeps the constraint.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

NAME = "experiences_batch_id_fkey"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint(NAME, "experiences", type_="foreignkey")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.create_foreign_key(NAME, "experiences", "batches", ["batch_id"], ["id"])
