"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("lease_until", sa.Float(), nullable=False),
        sa.Column("consumed_version", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "ix_batches_leased",
        "batches",
        ["owner"],
        unique=False,
        sqlite_where=sa.text("state = 'LEASED'"),
        postgresql_where=sa.text("state = 'LEASED'"),
    )
    op.create_table(
        "engines",
        sa.Column("url", sa.String(length=400), nullable=False),
        sa.Column("keeper", sa.String(length=64), nullable=True),
        sa.Column("keeper_until", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("url"),
    )
    op.create_table(
        "explorers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("acknowledged", sa.LargeBinary(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=400), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "open_streams",
        sa.Column("msg_id", sa.String(length=200), nullable=False),
        sa.Column("explorer", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("msg_id"),
    )
    op.create_table(
        "signals",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("msg_id", sa.String(length=200), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=True),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("key_name", sa.String(length=200), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_signals_message", "signals", ["msg_id", "choice"], unique=False)
    op.create_table(
        "trainers",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state_path", sa.Text(), nullable=True),
        sa.Column("stats", sa.LargeBinary(), nullable=True),
        sa.Column("alive", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "versions",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("served_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "experiences",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("msg_id", sa.String(length=200), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.String(length=220), nullable=True),
        sa.Column("conversation_id", sa.String(length=220), nullable=False),
        sa.Column("exchange", sa.LargeBinary(), nullable=True),
        sa.Column("task_id", sa.String(length=400), nullable=True),
        sa.Column("run_id", sa.String(length=400), nullable=True),
        sa.Column("key_name", sa.String(length=200), nullable=True),
        sa.Column("key_group", sa.String(length=200), nullable=True),
        sa.Column("feedback_key", sa.String(length=200), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("version_end", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("batch_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("consumed_version", sa.Integer(), nullable=True),
        sa.Column("n_prompt", sa.Integer(), nullable=False),
        sa.Column("n_reply", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("top_p", sa.Float(), nullable=False),
        sa.Column("top_k", sa.Integer(), nullable=False),
        sa.Column("min_p", sa.Float(), nullable=False),
        sa.Column("finish_reason", sa.String(length=40), nullable=True),
        sa.Column("latency_s", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("msg_id", "choice", name="uq_experiences_message"),
    )
    op.create_index("ix_experiences_batch", "experiences", ["batch_id"], unique=False)
    op.create_index("ix_experiences_conversation", "experiences", ["conversation_id"], unique=False)
    op.create_index("ix_experiences_exchange", "experiences", ["exchange"], unique=False)
    op.create_index(
        "ix_experiences_leased",
        "experiences",
        ["id"],
        unique=False,
        sqlite_where=sa.text("state = 'LEASED'"),
        postgresql_where=sa.text("state = 'LEASED'"),
    )
    op.create_index("ix_experiences_parent", "experiences", ["parent_id"], unique=False)
    op.create_index(
        "ix_experiences_ready",
        "experiences",
        ["id"],
        unique=False,
        sqlite_where=sa.text("state = 'READY'"),
        postgresql_where=sa.text("state = 'READY'"),
    )
    op.create_index(
        "ix_experiences_recorded",
        "experiences",
        ["id"],
        unique=False,
        sqlite_where=sa.text("state = 'RECORDED'"),
        postgresql_where=sa.text("state = 'RECORDED'"),
    )
    op.create_index("ix_experiences_task", "experiences", ["task_id", "run_id"], unique=False)
    op.create_table(
        "payloads",
        sa.Column(
            "experience_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=True),
        sa.Column("reply", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("experience_id"),
    )
