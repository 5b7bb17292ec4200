"""Indexes contain only rows with a value, and one finds the rewarded rows that wait for a commit.

For a chat without a task or a parent, three indexes contained a null each: one more page to write for every chat.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

COLUMNS = {
    "ix_experiences_task": ["task_id", "run_id"],
    "ix_experiences_batch": ["batch_id"],
    "ix_experiences_parent": ["parent_id"],
}


def upgrade() -> None:
    for name, columns in COLUMNS.items():
        op.drop_index(name, "experiences")
        _create(name, columns, f"{columns[0]} IS NOT NULL")
    _create("ix_experiences_rewarded", ["id"], "state = 'RECORDED' AND reward IS NOT NULL")


def downgrade() -> None:
    op.drop_index("ix_experiences_rewarded", "experiences")
    for name, columns in COLUMNS.items():
        op.drop_index(name, "experiences")
        op.create_index(name, "experiences", columns)


def _create(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "experiences", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
