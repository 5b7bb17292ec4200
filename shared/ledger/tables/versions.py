"""Versions, who decided about them, who reads their files, and the trainers that write them."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, String, Table, Text, text

from shared.ledger.tables.base import Id, metadata, partial_index

versions = Table(
    "versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("kind", String(8), nullable=False),
    Column("path", Text, nullable=False),  # relative to root_dir
    Column("state", String(12), nullable=False),  # VersionState
    Column("reason", Text),  # why SKIPPED, REJECTED or FAILED
    Column("step", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("served_at", Float),  # time of its first service
    Column("writer", String(200)),  # the trainer that reserved the number; null: the base model
    Column("manifest_sha256", String(64)),  # of MANIFEST.json; null if an older Flywheel published it
    Column("bytes", BigInteger),  # of all its files; null likewise
    Column("tag", String(200)),  # an operator's name for it; tagged versions are kept
    Column("decided_at", Float),  # time of its last change of state
    Column("deleted_at", Float),  # time since which its files are deleted, or about to be
    Column("share", Float),  # of the chats that name no version, given by an operator; null: none
)
partial_index("kept", "deleted_at IS NULL", versions.c.version)
partial_index("shared", "share IS NOT NULL", versions.c.version)

decisions = Table(  # append-only
    "decisions",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("version", Integer, nullable=False),
    Column("from_state", String(12)),  # VersionState; null for the first decision
    Column("to_state", String(12), nullable=False),  # VersionState
    Column("reason", Text),
    Column("decided_by", String(200), nullable=False),  # a trainer, an engine, an operator
    Column("decided_at", Float, nullable=False),  # Unix seconds
)
Index("ix_decisions_version", decisions.c.version, decisions.c.id)

version_leases = Table(
    "version_leases",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("reader", String(400), primary_key=True),  # reader of the version's files
    Column("purpose", String(12), primary_key=True),  # Purpose
    Column("owner", String(200), nullable=False),  # process that renews the lease
    Column("until", Float, nullable=False),  # Unix seconds
)

trainers = Table(
    "trainers",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("step", Integer, nullable=False),  # updates that the saved state contains
    Column("version", Integer, nullable=False),  # version of the saved state
    Column("state_path", Text),  # relative to root_dir; null before the first save
    Column("state_sha256", String(64)),  # of the saved state's files; null if an older Flywheel saved it
    Column("trouble", Text),  # why it cannot publish
    Column("tripped", LargeBinary),  # JSON: the bound of its breaker that was crossed, until an operator resumes it
    Column("resumed_version", Integer),  # newest version when last resumed: the breaker compares later ones
    Column("chosen", LargeBinary),  # JSON: with `algorithm: auto`, the algorithms in use with their weights
    Column("stats", LargeBinary),  # JSON: figures of the last update
    Column("rollbacks", Integer, nullable=False, server_default=text("0")),  # returns to an earlier version
    Column("alive", Boolean, nullable=False, server_default=text("true")),
    Column("heartbeat_at", Float, nullable=False),
)

trainer_states = Table(  # saved states that a trainer keeps, besides the one in its row
    "trainer_states",
    metadata,
    Column("trainer", String(200), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),  # relative to root_dir
    Column("sha256", String(64)),
    Column("step", Integer, nullable=False),
)
