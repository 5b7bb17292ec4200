"""An operator may give versions shares of the chats."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("versions", sa.Column("share", sa.Float))
    where = sa.text("share IS NOT NULL")
    op.create_index("ix_versions_shared", "versions", ["version"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index("ix_versions_shared", "versions")
    op.drop_column("versions", "share")
