"""A row names its conversation once that has another turn; until then the name is null, without an index entry.

The conversations of many agents have one turn. Existing rows keep their names.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

INDEX = "ix_experiences_conversation"
NAMED = sa.text("conversation_id IS NOT NULL")


def upgrade() -> None:
    op.drop_index(INDEX, "experiences")
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("experiences", "conversation_id", nullable=True)
    else:
        # SQLite changes no column; and building the table anew would, through its foreign key, empty `payloads`
        op.add_column("experiences", sa.Column("conversation", sa.String(220)))
        op.execute("UPDATE experiences SET conversation = conversation_id")
        op.drop_column("experiences", "conversation_id")
        op.execute("ALTER TABLE experiences RENAME COLUMN conversation TO conversation_id")
    op.create_index(INDEX, "experiences", ["conversation_id"], sqlite_where=NAMED, postgresql_where=NAMED)


def downgrade() -> None:
    op.execute(
        "UPDATE experiences SET conversation_id = CASE choice WHEN 0 THEN msg_id ELSE msg_id || '#' || choice END"
        " WHERE conversation_id IS NULL"
    )
    op.drop_index(INDEX, "experiences")
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("experiences", "conversation_id", nullable=False)
    op.create_index(INDEX, "experiences", ["conversation_id"])
