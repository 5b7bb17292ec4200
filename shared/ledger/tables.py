"""The ledger's tables. Narrow rows for what is polled; token arrays and texts stand apart, in `payloads`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

# SQLite's rowid is an INTEGER; PostgreSQL wants 64 bits said.
Id = BigInteger().with_variant(Integer, "sqlite")

experiences = Table(
    "experiences",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),  # the order in which rows were recorded
    Column("msg_id", String(200), nullable=False),
    Column("choice", Integer, nullable=False),
    Column("parent_id", String(220)),  # the exchange that this one extends: ID, or ID#CHOICE when it was not the first
    Column("conversation_id", String(220)),  # the first exchange of its conversation; null while that has no other
    Column("exchange", LargeBinary),  # digest of all messages up to and with the reply: what a later turn extends
    Column("task_id", String(400)),
    Column("run_id", String(400)),
    Column("key_name", String(200)),  # the key that chatted
    Column("key_group", String(200)),  # whose feedback may reach it; null: of keys without a group
    Column("feedback_key", String(200)),  # the key that last set the reward
    Column("version", Integer, nullable=False),  # sampled the first token
    Column("version_end", Integer, nullable=False),  # sampled the last token
    Column("state", String(12), nullable=False),
    Column("reason", Text),  # why DISCARDED
    Column("reward", Float),  # what the signals say now
    Column("batch_id", Id),  # the batch that holds or held it; no foreign key: see migrations, 0005
    Column("consumed_version", Integer),
    Column("n_prompt", Integer, nullable=False),  # tokens
    Column("n_reply", Integer, nullable=False),  # tokens
    Column("temperature", Float, nullable=False),
    Column("top_p", Float, nullable=False),
    Column("top_k", Integer, nullable=False),
    Column("min_p", Float, nullable=False),
    Column("finish_reason", String(40)),
    Column("latency_s", Float),
    Column("created_at", Float, nullable=False),  # Unix seconds
    UniqueConstraint("msg_id", "choice", name="uq_experiences_message"),
)


def _partial_index(name: str, where: str, *columns: Column[Any]) -> None:
    """An index of only the rows that someone looks for by it."""
    Index(f"ix_experiences_{name}", *columns, sqlite_where=text(where), postgresql_where=text(where))


for _state in ("RECORDED", "READY", "LEASED"):
    _partial_index(_state.lower(), f"state = '{_state}'", experiences.c.id)
_partial_index("rewarded", "state = 'RECORDED' AND reward IS NOT NULL", experiences.c.id)
_partial_index("task", "task_id IS NOT NULL", experiences.c.task_id, experiences.c.run_id)
_partial_index("batch", "batch_id IS NOT NULL", experiences.c.batch_id)
_partial_index("parent", "parent_id IS NOT NULL", experiences.c.parent_id)
_partial_index("conversation", "conversation_id IS NOT NULL", experiences.c.conversation_id)
Index("ix_experiences_exchange", experiences.c.exchange)

payloads = Table(
    "payloads",
    metadata,
    Column(
        "experience_id", Id, ForeignKey("experiences.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
    Column("tokens", LargeBinary, nullable=False),  # shared.experience.Tokens.encode
    Column("request", LargeBinary),  # JSON
    Column("reply", LargeBinary),  # JSON
    Column("prefix_of", Id),  # the experience whose tokens, left out here, its prompt begins with: see prefix.py
)
_named = text("prefix_of IS NOT NULL")
Index("ix_payloads_prefix", payloads.c.prefix_of, sqlite_where=_named, postgresql_where=_named)

signals = Table(
    "signals",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("msg_id", String(200), nullable=False),
    Column("choice", Integer, nullable=False),
    Column("kind", String(20), nullable=False),  # reward, rating, metric, comment, correction, preferred_over
    Column("name", String(200)),  # a metric's name
    Column("value", Float),
    Column("text", Text),
    Column("key_name", String(200)),
    Column("created_at", Float, nullable=False),
)
Index("ix_signals_message", signals.c.msg_id, signals.c.choice)

idempotency = Table(
    "idempotency",
    metadata,
    Column("key", String(400), primary_key=True),
    Column("response", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("kind", String(8), nullable=False),
    Column("path", Text, nullable=False),  # relative to root_dir
    Column("state", String(12), nullable=False),  # PUBLISHED, SERVING, RETIRED, REJECTED
    Column("reason", Text),  # why REJECTED
    Column("step", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("served_at", Float),  # when it first came into service
)

batches = Table(
    "batches",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("owner", String(200), nullable=False),
    Column("state", String(12), nullable=False),  # LEASED, CONSUMED, RETURNED
    Column("lease_until", Float, nullable=False),  # Unix seconds
    Column("consumed_version", Integer),
    Column("created_at", Float, nullable=False),
)
Index(
    "ix_batches_leased",
    batches.c.owner,
    sqlite_where=text("state = 'LEASED'"),
    postgresql_where=text("state = 'LEASED'"),
)

experiences.add_is_dependent_on(batches)  # copied after them: SQLite's foreign key stands

trainers = Table(
    "trainers",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("step", Integer, nullable=False),  # optimizer steps, in the saved state
    Column("version", Integer, nullable=False),  # the version that the saved state belongs to
    Column("state_path", Text),  # relative to root_dir; null before the first save
    Column("stats", LargeBinary),  # JSON: the last update's figures
    Column("alive", Boolean, nullable=False, server_default=text("true")),
    Column("heartbeat_at", Float, nullable=False),
)

explorers = Table(
    "explorers",
    metadata,
    Column("id", String(64), primary_key=True),  # new with each start
    Column("acknowledged", LargeBinary, nullable=False),  # JSON: engine url → generation
    Column("heartbeat_at", Float, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    Column("url", String(400), primary_key=True),
    Column("keeper", String(64)),  # the explorer that moves it from version to version
    Column("keeper_until", Float, nullable=False),  # Unix seconds
    Column("state", String(12), nullable=False),  # as explorer_service.engines.pool.EngineState
    Column("version", Integer),
    Column("generation", Integer, nullable=False),  # counts the keeper's moves
)

open_streams = Table(
    "open_streams",
    metadata,
    Column("msg_id", String(200), primary_key=True),
    Column("explorer", String(64), nullable=False),
)
