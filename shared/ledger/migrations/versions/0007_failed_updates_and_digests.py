"""Rows count the failed updates with them, quarantined rows have an index, and a saved state has a digest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

INDEX = "ix_experiences_quarantined"
QUARANTINED = sa.text("substr(reason, 1, 12) = 'quarantined:'")


def upgrade() -> None:
    op.create_index(INDEX, "experiences", ["id"], sqlite_where=QUARANTINED, postgresql_where=QUARANTINED)
    op.add_column("experiences", sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("experiences", sa.Column("deaths", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("batches", sa.Column("updating", sa.Boolean, nullable=False, server_default=sa.text("false")))
    op.add_column("trainers", sa.Column("state_sha256", sa.String(64)))
    op.add_column("trainers", sa.Column("trouble", sa.Text))


def downgrade() -> None:
    op.drop_index(INDEX, "experiences")
    for table, column in (
        ("trainers", "trouble"),
        ("trainers", "state_sha256"),
        ("batches", "updating"),
        ("experiences", "deaths"),
        ("experiences", "failures"),
    ):
        op.drop_column(table, column)
