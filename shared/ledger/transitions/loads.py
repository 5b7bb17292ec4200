"""9, reload: failed loads of versions, and the differences between engines and trainer on version 0."""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, insert, select

from shared.ledger.connect import insert_into
from shared.ledger.tables import calibrations, load_failures


def count_load_failure(connection: Connection, version: int, engine: str, reason: str) -> int:
    """Count an engine's crash or timeout while it loaded a version. Returns the number of these failures."""
    row = {"version": version, "engine": engine, "reason": reason[:2000], "created_at": time.time()}
    connection.execute(insert(load_failures).values(row))
    of_version = load_failures.c.version == version
    return int(connection.execute(select(func.count()).select_from(load_failures).where(of_version)).scalar_one())


def calibrate_engine(connection: Connection, engine: str, dtype: str, largest: float, mean: float) -> None:
    """Store an engine's differences from the trainer, once."""
    row = {"engine": engine, "dtype": dtype, "largest": largest, "mean": mean, "created_at": time.time()}
    connection.execute(insert_into(connection, calibrations).values(row).on_conflict_do_nothing())
