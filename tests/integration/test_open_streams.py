"""The table of open streams, when the ledger stores a write but its answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection

from explorer_service.membership import Membership
from explorer_service.record import OpenStreams
from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.ledger.transitions import RunName


class LosingWriter:
    """Stores every write; `loses` its answers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.loses = False

    async def write(self, work: Callable[[Connection], Any]) -> Any:
        with self._ledger.write() as connection:
            result = work(connection)
        if self.loses:
            raise LedgerError("a fault was put in")
        return result


def test_a_stream_that_ends_after_a_failed_announcement_leaves_nothing_behind(ledger):
    writer: Any = LosingWriter(ledger)
    membership = Membership(writer, {})
    streams = OpenStreams(None, writer, membership)  # type: ignore[arg-type]

    async def end_after_the_failure() -> None:
        async with streams.opened("chatcmpl-1", RunName("t", "1")):
            writer.loses = True
            assert membership.on_first_other is not None
            with pytest.raises(LedgerError):
                await membership.on_first_other()
            writer.loses = False

    asyncio.run(end_after_the_failure())
    with ledger.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM open_streams").scalar_one() == 0
