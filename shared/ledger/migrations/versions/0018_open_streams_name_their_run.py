"""An open stream stores its run; feedback for the run waits for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

LENGTHS = {"task_id": 400, "run_id": 400, "key_group": 200}


def upgrade() -> None:
    for name, length in LENGTHS.items():
        op.add_column("open_streams", sa.Column(name, sa.String(length), nullable=True))


def downgrade() -> None:
    for name in LENGTHS:
        op.drop_column("open_streams", name)
