"""Every version that was trained on a row is stored, not only the first and, until the next claim, the last.

Of rows that were trained on more than twice, or given back after it, the versions between are not known.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"

KNOWN = """
INSERT INTO lineage (experience_id, version, consumed)
SELECT id, consumed_version, true FROM experiences WHERE consumed_version IS NOT NULL
UNION
SELECT experiences.id, batches.consumed_version, true
FROM experiences JOIN batches ON batches.id = experiences.batch_id
WHERE batches.state = 'CONSUMED' AND batches.consumed_version IS NOT NULL AND experiences.consumed_version IS NOT NULL
AND substr(coalesce(experiences.reason, ''), 1, 12) <> 'quarantined:'
"""


def upgrade() -> None:
    row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "lineage",
        sa.Column("experience_id", row_id, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("consumed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("experience_id", "version"),
    )
    op.execute(KNOWN)
    op.create_index("ix_lineage_version", "lineage", ["version"])


def downgrade() -> None:
    op.drop_table("lineage")
