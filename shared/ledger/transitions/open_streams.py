"""Streams whose message id the caller knows before the rows are stored; feedback to another explorer waits for them."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, delete

from shared.ledger.connect import insert_into
from shared.ledger.tables import open_streams


class RunName(NamedTuple):
    """A run, as the chats of one group of keys name it."""

    task_id: str | None = None
    run_id: str | None = None
    key_group: str | None = None


def open_stream(connection: Connection, msg_id: str, explorer: str, run: RunName) -> None:
    """Record that the caller is about to learn this id before its rows are stored."""
    opened = insert_into(connection, open_streams).values(msg_id=msg_id, explorer=explorer, **run._asdict())
    connection.execute(opened.on_conflict_do_nothing())  # a repeat, if the answer to the first call was lost


def close_stream(connection: Connection, msg_id: str) -> None:
    """Record that the rows are stored, or never will be."""
    connection.execute(delete(open_streams).where(open_streams.c.msg_id == msg_id))
