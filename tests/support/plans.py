"""The query plans of the statements that a transaction executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event

from shared.ledger.connect import Ledger


def plans_of(ledger: Ledger, work: Callable[[Connection], object]) -> list[tuple[str, str]]:
    """Each SELECT and UPDATE of a transaction, with the database's plan; PostgreSQL scans a table only where no
    index serves."""
    made: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE")):
            made.append((statement, parameters))

    with ledger.write() as connection:
        event.listen(connection, "before_cursor_execute", note)
        work(connection)
        event.remove(connection, "before_cursor_execute", note)
        explain = "EXPLAIN QUERY PLAN"
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            explain = "EXPLAIN"
        return [
            (statement, "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {statement}", given)))
            for statement, given in made
        ]
