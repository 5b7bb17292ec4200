"""Stores failed loads, differences of engines on version 0, and whether a reload spoiled requests in flight.

Acknowledgements of explorers get another form; each explorer writes them again when it starts.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.execute("DELETE FROM explorers")
    op.add_column("engines", sa.Column("spoiled", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("engines", sa.Column("switched_at", sa.Float, nullable=False, server_default=sa.text("0")))
    op.create_table(
        "load_failures",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("engine", sa.String(length=400), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    )
    op.create_index("ix_load_failures_version", "load_failures", ["version"])
    op.create_table(
        "calibrations",
        sa.Column("engine", sa.String(length=400), nullable=False),
        sa.Column("dtype", sa.String(length=20), nullable=False),
        sa.Column("largest", sa.Float(), nullable=False),
        sa.Column("mean", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "dtype"),
    )


def downgrade() -> None:
    op.execute("DELETE FROM explorers")
    op.drop_table("calibrations")
    op.drop_table("load_failures")
    op.drop_column("engines", "switched_at")
    op.drop_column("engines", "spoiled")
