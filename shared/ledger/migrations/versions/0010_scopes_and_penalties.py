"""Signals store their scope; rows store the outcome of the whole, whether they teach, and all sampling parameters.

Earlier signals had no scope: they keep the scope of a message, as they were trained on.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

REWARDED, TEACHING = "ix_experiences_rewarded", "ix_experiences_teaching"
FALSE, ZERO, ONE = sa.text("false"), sa.text("0"), sa.text("1")
COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "experiences": {
        "turn_reward": {"type_": sa.Float()},
        "outcome": {"type_": sa.Float()},
        "teaches": {"type_": sa.Boolean(), "nullable": False, "server_default": FALSE},
        "repetition_penalty": {"type_": sa.Float(), "nullable": False, "server_default": ONE},
        "presence_penalty": {"type_": sa.Float(), "nullable": False, "server_default": ZERO},
        "frequency_penalty": {"type_": sa.Float(), "nullable": False, "server_default": ZERO},
        "masked": {"type_": sa.Boolean(), "nullable": False, "server_default": FALSE},
    },
    "signals": {"scope": {"type_": sa.String(12), "nullable": False, "server_default": sa.text("'message'")}},
}


def upgrade() -> None:
    for table, columns in COLUMNS.items():
        for name, declared in columns.items():
            op.add_column(table, sa.Column(name, **declared))
    op.execute("UPDATE experiences SET turn_reward = reward, teaches = true WHERE reward IS NOT NULL")
    op.drop_index(REWARDED, "experiences")
    _create(TEACHING, "state = 'RECORDED' AND teaches = 1", "state = 'RECORDED' AND teaches")


def downgrade() -> None:
    op.drop_index(TEACHING, "experiences")
    rewarded = "state = 'RECORDED' AND reward IS NOT NULL"
    _create(REWARDED, rewarded, rewarded)
    for table, columns in COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)


def _create(name: str, sqlite: str, postgresql: str) -> None:
    op.create_index(name, "experiences", ["id"], sqlite_where=sa.text(sqlite), postgresql_where=sa.text(postgresql))
