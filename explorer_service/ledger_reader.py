"""Read the ledger for callers, with a timeout for a database that does not answer.

It uses its own threads, so that callers never occupy those of the event loop, which reloads need.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection

from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.log import StageLogger

T = TypeVar("T")
log = StageLogger("explorer")
_AT_ONCE = 4  # concurrent reads; on PostgreSQL, each needs one of the ten connections of a process


class LedgerReader:
    """`await read(query)` returns the query's result."""

    def __init__(self, ledger: Ledger, timeout_s: float) -> None:
        """timeout_s: after this time, a read raises LedgerError."""
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, "ledger-reader")
        self._free = asyncio.Semaphore(_AT_ONCE)  # threads
        self._answered_at = self._failed_at = -math.inf  # time.monotonic(): of the last reads

    async def stop(self) -> None:
        """Wait for the running reads, and cancel the others."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def read(self, query: Callable[[Connection], T], timeout_s: float | None = None) -> T:
        """Run `query` on a snapshot. Raises its exceptions, or LedgerError.

        timeout_s: replaces the reader's timeout, for a query of many statements. It does not while the read waits for a
        thread and no other read is answered.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._take_thread()
                reading = self._threads.submit(self._ledger.fetch, query)
                reading.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._note_end, ended))
                return await asyncio.wrap_future(reading)
        except TimeoutError as exc:
            error = _no_answer(timeout_s)
            log.warning("the ledger cannot be read", reason=str(error))
            raise error from exc
        except LedgerError as error:
            log.warning("the ledger cannot be read", reason=str(error))
            raise

    async def _take_thread(self) -> None:
        """Wait for a thread. Raises LedgerError if the reads that have the threads get no answer."""
        began = time.monotonic()
        waiting = asyncio.ensure_future(self._free.acquire())
        try:
            while not waiting.done():
                left_s = max(began, self._answered_at) + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise _no_answer(self._timeout_s)
                await asyncio.wait((waiting,), timeout=left_s)
            if self._answered_at < began < self._failed_at:
                raise _no_answer(self._timeout_s)
        except BaseException:
            if not waiting.cancel():  # it has one
                self._free.release()
            raise

    def _note_end(self, ended: Future[Any]) -> None:
        if not ended.cancelled():
            if isinstance(ended.exception(), LedgerError):
                self._failed_at = time.monotonic()
            else:  # other exceptions are of the query itself
                self._answered_at = time.monotonic()
        self._free.release()


def _no_answer(timeout_s: float) -> LedgerError:
    return LedgerError(f"the database has not answered within {timeout_s:g} s; is it up and reachable?")
