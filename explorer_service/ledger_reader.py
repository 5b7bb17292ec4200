"""Reads of the ledger on behalf of callers: none of them waits for a database that does not answer.

In threads of their own: however many callers read, those of the event loop are left to reloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection

from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.log import StageLogger

T = TypeVar("T")
log = StageLogger("explorer")
_AT_ONCE = 4  # reads; on PostgreSQL each has a connection, of ten that a process may have


class LedgerReader:
    """`await read(query)` returns what the query found."""

    def __init__(self, ledger: Ledger, timeout_s: float) -> None:
        """timeout_s: who waits longer hears LedgerError."""
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, "ledger-reader")

    async def stop(self) -> None:
        """Wait for the reads that have begun, and drop the others."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def read(self, query: Callable[[Connection], T], timeout_s: float | None = None) -> T:
        """Run `query` on a snapshot. Raises what it raised, or LedgerError.

        timeout_s: another one, for a query of many statements.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._ledger.fetch, query)
        except TimeoutError as exc:
            reason = f"the database has not answered within {timeout_s:g} s; is it up and reachable?"
            log.warning("the ledger cannot be read", reason=reason)
            raise LedgerError(reason) from exc
        except LedgerError as error:
            log.warning("the ledger cannot be read", reason=str(error))
            raise
