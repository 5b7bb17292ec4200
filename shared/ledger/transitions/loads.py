"""9, reload: what happened to engines that took up a version, and what they showed on version 0."""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, insert, select

from shared.ledger.connect import insert_into
from shared.ledger.tables import calibrations, load_failures


def count_load_failure(connection: Connection, version: int, engine: str, reason: str) -> int:
    """An engine died, or took too long, while it took up a version. Returns how often that has happened."""
    row = {"version": version, "engine": engine, "reason": reason[:2000], "created_at": time.time()}
    connection.execute(insert(load_failures).values(row))
    of_version = load_failures.c.version == version
    return int(connection.execute(select(func.count()).select_from(load_failures).where(of_version)).scalar_one())


def calibrate_engine(connection: Connection, engine: str, dtype: str, largest: float, mean: float) -> None:
    """Store an engine's differences from the trainer, once."""
    row = {"engine": engine, "dtype": dtype, "largest": largest, "mean": mean, "created_at": time.time()}
    connection.execute(insert_into(connection, calibrations).values(row).on_conflict_do_nothing())
