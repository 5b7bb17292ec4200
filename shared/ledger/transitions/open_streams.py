"""Streams whose caller knows the message id before its rows are stored: feedback to another explorer waits for them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete
from sqlalchemy.dialects import postgresql, sqlite

from shared.ledger.tables import open_streams


def open_stream(connection: Connection, msg_id: str, explorer: str) -> None:
    """The caller is about to learn this id, and its rows are not stored yet."""
    make: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    opened = make(open_streams).values(msg_id=msg_id, explorer=explorer)
    connection.execute(opened.on_conflict_do_nothing())  # told again, where the answer to the first time was lost


def close_stream(connection: Connection, msg_id: str) -> None:
    """The rows are stored, or never will be."""
    connection.execute(delete(open_streams).where(open_streams.c.msg_id == msg_id))
