"""Version numbers are reserved, each change of a version's state is a decision, and leases keep its files.

Every version gets one decision for its current state. A RETIRED one that never served becomes SKIPPED.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COLUMNS: dict[str, Any] = {
    "writer": sa.String(length=200),
    "manifest_sha256": sa.String(length=64),
    "bytes": sa.BigInteger(),
    "tag": sa.String(length=200),
    "decided_at": sa.Float(),
    "deleted_at": sa.Float(),
}
BACKFILL = (
    "UPDATE versions SET state = 'SKIPPED' WHERE state = 'RETIRED' AND served_at IS NULL",
    "UPDATE versions SET decided_at = coalesce(served_at, created_at)",
    "INSERT INTO decisions (version, from_state, to_state, reason, decided_by, decided_at)"
    " SELECT version, NULL, state, reason, 'migration 0009', decided_at FROM versions ORDER BY version",
    "INSERT INTO trainer_states (trainer, version, path, sha256, step)"
    " SELECT name, version, state_path, state_sha256, step FROM trainers WHERE state_path IS NOT NULL",
)


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("versions", sa.Column(name, kind))
    op.create_table(
        "decisions",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.String(length=12)),
        sa.Column("to_state", sa.String(length=12), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("decided_by", sa.String(length=200), nullable=False),
        sa.Column("decided_at", sa.Float(), nullable=False),
    )
    op.create_index("ix_decisions_version", "decisions", ["version", "id"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=200), primary_key=True),
        sa.Column("owner", sa.String(length=200)),
        sa.Column("until", sa.Float(), nullable=False),
    )
    op.create_table(
        "version_leases",
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("reader", sa.String(length=400), primary_key=True),
        sa.Column("purpose", sa.String(length=12), primary_key=True),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
    )
    op.create_table(
        "trainer_states",
        sa.Column("trainer", sa.String(length=200), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64)),
        sa.Column("step", sa.Integer(), nullable=False),
    )
    for statement in BACKFILL:
        op.execute(statement)


def downgrade() -> None:
    for table in ("trainer_states", "version_leases", "leases", "decisions"):
        op.drop_table(table)
    op.execute("DELETE FROM versions WHERE state = 'RESERVED'")
    op.execute("UPDATE versions SET state = 'RETIRED' WHERE state = 'SKIPPED'")
    op.execute("UPDATE versions SET state = 'REJECTED' WHERE state = 'FAILED'")
    for name in reversed(COLUMNS):
        op.drop_column("versions", name)
