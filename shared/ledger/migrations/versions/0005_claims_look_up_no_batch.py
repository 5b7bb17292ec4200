"""PostgreSQL checks no more, for each row that is claimed, that the batch is there which the same statement makes.

It did so by a plan kept from when there were few batches, through all of them: claims grew slower until the next ANALYZE.
SQLite looks them up by their key, and drops no constraint.
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
