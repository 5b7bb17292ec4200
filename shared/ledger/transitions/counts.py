"""Merges the counts of rows by state, which triggers of the database maintain, into few lines."""

from __future__ import annotations

from sqlalchemy import Connection, text

_MERGE = text(
    "WITH picked AS (SELECT state, slot FROM row_counts FOR UPDATE SKIP LOCKED),"
    " gone AS (DELETE FROM row_counts AS c USING picked WHERE c.state = picked.state AND c.slot = picked.slot"
    " RETURNING c.state, c.n)"
    " INSERT INTO row_counts (state, slot, n)"
    " SELECT state, nextval('row_counts_slots'), sum(n) FROM gone GROUP BY state HAVING sum(n) <> 0"
)
_FEW = 100  # number of lines that is not worth merging


def merge_counts(connection: Connection) -> None:
    """Merge the lines of each state into one (PostgreSQL); several processes may do so concurrently."""
    if connection.dialect.name != "postgresql":
        return
    if connection.execute(text("SELECT count(*) FROM row_counts")).scalar_one() > _FEW:
        connection.execute(_MERGE)
