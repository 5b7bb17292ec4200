"""Indexes contain the READY rows of each task, and the versions whose files are not given up.

Without them, claims of whole tasks read all rows that a task ever had, and each new version all earlier ones.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"

INDEXES = {
    "ix_experiences_task_ready": (["task_id", "run_id"], "coalesce(state, '') = 'READY' AND task_id IS NOT NULL"),
    "ix_versions_kept": (["version"], "deleted_at IS NULL"),
}


def upgrade() -> None:
    for name, (columns, condition) in INDEXES.items():
        where = sa.text(condition)
        op.create_index(name, name.split("_")[1], columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    for name in INDEXES:
        op.drop_index(name, name.split("_")[1])
