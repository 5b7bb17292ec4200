"""Explorers and engines, what engines were found to do, and what one process at a time may do."""

from __future__ import annotations

from sqlalchemy import Column, Float, Index, Integer, LargeBinary, String, Table, Text, text

from shared.ledger.tables.base import Id, metadata

explorers = Table(
    "explorers",
    metadata,
    Column("id", String(64), primary_key=True),  # new at each start
    Column("acknowledged", LargeBinary, nullable=False),  # JSON: shared.ledger.queries.Followed by engine
    Column("settings", LargeBinary),  # JSON: settings in which all explorers must agree, by their keys
    Column("heartbeat_at", Float, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    # for a loopback address, prefixed with the machine's name; or `engine` and the engine's own name: a second lease
    Column("url", String(400), primary_key=True),
    Column("owner", String(64)),  # the explorer that changes its version
    Column("owner_until", Float, nullable=False),  # Unix seconds
    Column("state", String(12), nullable=False),  # as explorer_service.engines.engine.EngineState
    Column("version", Integer),
    Column("generation", Integer, nullable=False),  # number of changes of its state
    # the generation in which requests in flight were last sampled by weights that failed their proof
    Column("spoiled", Integer, nullable=False, server_default=text("0")),
    Column("switched_at", Float, nullable=False, server_default=text("0")),  # when its weights were last replaced
)

load_failures = Table(  # engines that crashed or timed out while they loaded a version
    "load_failures",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("version", Integer, nullable=False),
    Column("engine", String(400), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
Index("ix_load_failures_version", load_failures.c.version)

calibrations = Table(  # difference between an engine and the trainer on version 0, which the engine is started with
    "calibrations",
    metadata,
    Column("engine", String(400), primary_key=True),
    Column("dtype", String(20), primary_key=True),
    Column("largest", Float, nullable=False),  # difference of one logprob
    Column("mean", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(200), primary_key=True),  # what only one process at a time may do
    Column("owner", String(200)),
    Column("until", Float, nullable=False),  # Unix seconds
)

open_streams = Table(
    "open_streams",
    metadata,
    Column("msg_id", String(200), primary_key=True),
    Column("explorer", String(64), nullable=False),
    Column("task_id", String(400)),
    Column("run_id", String(400)),
    Column("key_group", String(200)),
)
