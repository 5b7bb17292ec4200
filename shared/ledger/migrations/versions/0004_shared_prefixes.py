"""A turn's payload may name the experience with which its prompt begins, and omit those tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

INDEX = "ix_payloads_prefix"
NAMED = sa.text("prefix_of IS NOT NULL")


def upgrade() -> None:
    op.add_column("payloads", sa.Column("prefix_of", sa.BigInteger().with_variant(sa.Integer, "sqlite")))
    op.create_index(INDEX, "payloads", ["prefix_of"], sqlite_where=NAMED, postgresql_where=NAMED)


def downgrade() -> None:
    named = op.get_bind().execute(sa.text("SELECT count(*) FROM payloads WHERE prefix_of IS NOT NULL")).scalar()
    if named:
        raise RuntimeError(f"{named} turns share tokens with others; the older schema cannot say so")
    op.drop_index(INDEX, "payloads")
    op.drop_column("payloads", "prefix_of")
