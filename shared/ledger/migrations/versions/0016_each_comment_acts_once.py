"""Each comment, correction and preference acts once, and so does the user's next message.

For a row that was trained on, all present signals count as used: those that did not act never will.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
_ERASED, _ALL = 31, 63  # every lesson that there was, and that there is


def upgrade() -> None:
    op.add_column("experiences", sa.Column("heard", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("batches", sa.Column("last_signal", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    newest = "(SELECT coalesce(max(id), 0) FROM signals)"
    op.execute(f"UPDATE experiences SET heard = {newest} WHERE taught <> 0")
    op.execute(f"UPDATE batches SET last_signal = {newest} WHERE state = 'LEASED'")
    op.execute(f"UPDATE experiences SET taught = {_ALL} WHERE taught = {_ERASED}")


def downgrade() -> None:
    op.execute(f"UPDATE experiences SET taught = taught & {_ERASED}, acts = acts & {_ERASED}")
    op.drop_column("batches", "last_signal")
    op.drop_column("experiences", "heard")
