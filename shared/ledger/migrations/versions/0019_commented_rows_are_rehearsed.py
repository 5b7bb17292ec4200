"""The index for rehearsal includes rows whose comments were trained on, besides those with written answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

INDEX = "ix_experiences_rehearsable"
WRITTEN, WRITTEN_OR_SAID = 20, 22  # lessons


def upgrade() -> None:
    _index(WRITTEN_OR_SAID)


def downgrade() -> None:
    _index(WRITTEN)


def _index(lessons: int) -> None:
    op.drop_index(INDEX, "experiences")
    where = sa.text(f"(taught & {lessons}) <> 0")
    op.create_index(INDEX, "experiences", ["id"], sqlite_where=where, postgresql_where=where)
