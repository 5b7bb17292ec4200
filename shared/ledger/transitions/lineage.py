"""Stores which versions were trained on which rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, insert, literal, select

from shared.ledger.conditions import in_parts
from shared.ledger.connect import insert_into
from shared.ledger.tables import experiences, lineage, versions

_COLUMNS = ["experience_id", "version", "consumed"]


def add_trained(connection: Connection, version: int, ids: Collection[int]) -> None:
    """Store that a version was trained on these rows, as far as they are still in the ledger."""
    for part in in_parts(experiences.c.id, sorted(ids)):
        rows = select(experiences.c.id, literal(version), literal(False)).where(part)
        connection.execute(insert_into(connection, lineage).from_select(_COLUMNS, rows).on_conflict_do_nothing())


def add_consumed(connection: Connection, version: int, rows: Sequence[ColumnElement[bool]]) -> None:
    """Store that a saved state contains a version whose batches held these rows."""
    added = insert_into(connection, lineage).from_select(
        _COLUMNS, select(experiences.c.id, literal(version), literal(True)).where(*rows)
    )
    key = [lineage.c.experience_id, lineage.c.version]
    connection.execute(added.on_conflict_do_update(index_elements=key, set_={"consumed": True}))


def restore_lineage(connection: Connection, row_id: int, trained_by: Mapping[str, bool]) -> None:
    """Store the versions of this ledger that were trained on an imported row. trained_by: see `restore_trained`."""
    query = select(versions.c.version, versions.c.manifest_sha256)
    for part in in_parts(versions.c.manifest_sha256, sorted(trained_by)):
        found = [
            {"experience_id": row_id, "version": row.version, "consumed": trained_by[row.manifest_sha256]}
            for row in connection.execute(query.where(part))
        ]
        if found:
            connection.execute(insert(lineage), found)
