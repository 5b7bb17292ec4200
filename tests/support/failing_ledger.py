"""A ledger that refuses one statement of a take-up, in the process that runs the test and its explorers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event

from shared.errors import LedgerError

_TABLES = "versions|engines|explorers|leases|load_failures|decisions|calibrations"
_HEARTBEATS = re.compile(r"SET owner_until=\S+ WHERE engines\.owner = |SET until=\S+ WHERE leases\.owner")
_OTHERS = ("MainThread", "version-poller_0")  # threads of the test itself, and of queries in no take-up


class FailingLedger:
    """Refuses one statement of a take-up, counted from the call of `arm`."""

    def __init__(self) -> None:
        self._left = 0
        self._only: str | None = None
        self.refused: str | None = None
        self.met: dict[str, None] = {}  # the statements seen so far, in order

    def arm(self, number: int, statement: str | None = None) -> None:
        """statement: count only statements with this text."""
        self._left, self._only, self.refused = number, statement, None

    def look_at(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        of_a_take_up = re.match(rf"(SELECT|UPDATE|INSERT INTO|DELETE) .*\b({_TABLES})\b", statement, re.S)
        of_a_heartbeat = "explorers SET" in statement or _HEARTBEATS.search(statement)
        if not of_a_take_up or of_a_heartbeat or threading.current_thread().name in _OTHERS:
            return
        self.met[statement] = None
        if self._left and self._only in (None, statement):
            self._left -= 1
            if not self._left:
                self.refused = statement
                raise LedgerError("a fault was put in")


@contextmanager
def failing_statements() -> Iterator[FailingLedger]:
    """Apply to all ledgers of this process, until the end of the block."""
    ledger = FailingLedger()
    event.listen(Engine, "before_cursor_execute", ledger.look_at)
    try:
        yield ledger
    finally:
        event.remove(Engine, "before_cursor_execute", ledger.look_at)
