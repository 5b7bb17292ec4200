"""Rows store what they may be trained on, and what they were trained on, as lessons: bits of shared.reward.Lesson.

Before, a row was trained on once, for a reward and, if it had one, a correction.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

TEACHING, REHEARSABLE = "ix_experiences_teaching", "ix_experiences_rehearsable"
REWARD, CORRECTION = 1, 4
SAID = (
    f"CASE WHEN reward IS NULL THEN 0 ELSE {REWARD} END + CASE WHEN EXISTS (SELECT 1 FROM signals WHERE"
    " signals.msg_id = experiences.msg_id AND signals.choice = experiences.choice AND signals.kind = 'correction')"
    f" THEN {CORRECTION} ELSE 0 END"
)


def upgrade() -> None:
    op.drop_index(TEACHING, "experiences")
    for name in ("acts", "taught", "said"):
        op.add_column("experiences", sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.execute(f"UPDATE experiences SET said = {SAID} WHERE teaches")
    op.execute("UPDATE experiences SET acts = said WHERE state = 'LEASED'")
    op.execute(f"UPDATE experiences SET taught = {REWARD} | said, said = 0 WHERE state = 'CONSUMED'")
    op.drop_column("experiences", "teaches")
    op.alter_column("experiences", "said", new_column_name="teaches")
    where = sa.text("teaches <> 0 AND state IN ('RECORDED', 'CONSUMED')")
    op.create_index(TEACHING, "experiences", ["id"], sqlite_where=where, postgresql_where=where)
    where = sa.text("(taught & 20) <> 0")
    op.create_index(REHEARSABLE, "experiences", ["id"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index(REHEARSABLE, "experiences")
    op.drop_index(TEACHING, "experiences")
    op.alter_column("experiences", "teaches", new_column_name="said")
    op.add_column("experiences", sa.Column("teaches", sa.Boolean(), nullable=False, server_default=sa.text("false")))
    op.execute("UPDATE experiences SET teaches = (said <> 0)")
    for name in ("acts", "taught", "said"):
        op.drop_column("experiences", name)
    sqlite, postgresql = (sa.text(f"state = 'RECORDED' AND teaches{is_true}") for is_true in (" = 1", ""))
    op.create_index(TEACHING, "experiences", ["id"], sqlite_where=sqlite, postgresql_where=postgresql)
