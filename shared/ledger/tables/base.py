"""What all tables share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, text

metadata = MetaData()

Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite's rowid is an INTEGER


def partial_index(name: str, where: str, *columns: Column[Any]) -> None:
    """Create a partial index of only the rows that are searched by it."""
    Index(f"ix_{columns[0].table.name}_{name}", *columns, sqlite_where=text(where), postgresql_where=text(where))
