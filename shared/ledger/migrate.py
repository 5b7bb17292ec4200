"""Migrates a database to the schema of this Flywheel, and copies a ledger from one database to another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, String, Table, func, insert, inspect, select, text

from shared.errors import LedgerError
from shared.ledger.migrations import HEAD
from shared.ledger.tables import batches, metadata, row_counts, signals

_CHUNK = 1000  # rows


def bring_to_head(connection: Connection) -> None:
    """Run the missing migrations inside the caller's transaction.

    Raises LedgerError if a newer Flywheel created the database, or if it has foreign tables.
    """
    at = schema_version(connection)
    if at == HEAD:
        return
    if at is not None and at > HEAD:
        raise LedgerError(
            f"the ledger has schema {at}, this Flywheel knows {HEAD}: a newer one made it; upgrade this one"
        )
    if at is None and inspect(connection).has_table("experiences"):
        raise LedgerError("the database has a table `experiences` that is not ours; name an empty database")
    run_steps(connection, HEAD)


def run_steps(connection: Connection, target: str) -> None:
    """Run the migrations from the database's schema to `target`."""
    from alembic import command  # slow to import, and rarely needed
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, target)


def schema_version(connection: Connection) -> str | None:
    """Return the last migration that ran; None for a database without our tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    version: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return version


def copy_ledger(
    source: Connection, target: Connection, progress: Callable[[str, int, int], None], *, writers_wait: bool = True
) -> dict[str, int]:
    """Copy every row into an empty ledger, and compare the two by checksum. Returns the number of rows by table.

    progress(table, rows copied, total rows). Memory does not grow with the ledger. writers_wait: in a write
    transaction, writers to the source wait for its end; False: the source is a snapshot. Raises LedgerError.
    """
    if writers_wait and source.dialect.name == "postgresql":  # SQLite allows one writer, which is this transaction
        source.exec_driver_sql(f"LOCK TABLE {', '.join(table.name for table in metadata.sorted_tables)} IN SHARE MODE")
    filled = [t.name for t in metadata.sorted_tables if target.execute(select(func.count()).select_from(t)).scalar()]
    if filled:
        raise LedgerError(f"the target holds rows already (in {', '.join(filled)}); name an empty database")
    copied: dict[str, int] = {}
    for table in metadata.sorted_tables:
        if table is row_counts:  # triggers of the target count
            continue
        total = int(source.execute(select(func.count()).select_from(table)).scalar_one())
        done = 0
        for chunk in _chunks(source, table):
            target.execute(insert(table), chunk)
            done += len(chunk)
            progress(table.name, done, total)
        if _digest(source, table) != _digest(target, table):
            raise LedgerError(f"table {table.name} differs after copying; nothing was written to the target")
        copied[table.name] = done
    for table in metadata.sorted_tables:
        _continue_numbering(target, table)
    return copied


def _chunks(connection: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows in chunks, in the order of their key: of the bytes of names, whatever the database's order is."""
    by_bytes = "C" if connection.dialect.name == "postgresql" else "BINARY"
    keys = table.primary_key.columns
    query = select(table).order_by(*(key.collate(by_bytes) if isinstance(key.type, String) else key for key in keys))
    result = connection.execute(query, execution_options={"yield_per": _CHUNK})
    for part in result.partitions(_CHUNK):
        yield [dict(row._mapping) for row in part]


def _digest(connection: Connection, table: Table) -> str:
    """Return a checksum over all rows, equal on every database."""
    digest = hashlib.sha256()
    for chunk in _chunks(connection, table):
        for row in chunk:
            for value in row.values():
                digest.update(_as_text(value).encode())
    return digest.hexdigest()


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return repr(value + 0.0)  # 0.0 for -0.0, which SQLite does not store
    return repr(bytes(value) if isinstance(value, memoryview) else value)


def _continue_numbering(connection: Connection, table: Table) -> None:
    """Advance PostgreSQL's sequence past the copied ids."""
    column = table.autoincrement_column
    if connection.dialect.name != "postgresql" or column is None:
        return
    sequence = connection.execute(select(func.pg_get_serial_sequence(table.name, column.name))).scalar()
    if sequence is not None:
        highest = connection.execute(select(func.max(column))).scalar() or 0
        if table is signals:  # newer signals may be deleted, and a batch compares with its last one
            highest = max(highest, connection.execute(select(func.max(batches.c.last_signal))).scalar() or 0)
        if highest:
            connection.execute(select(func.setval(sequence, highest)))
