"""Poll the ledger for the versions that should serve, in one thread for all engines.

The thread calls the event loop only after a change, so that an idle explorer stays idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from explorer_service.background import Background
from shared.clock import until_next_tick
from shared.errors import LedgerError
from shared.ledger.connect import DedicatedConnection, Ledger
from shared.ledger.queries import VersionRow, Wanted, wanted_versions
from shared.log import StageLogger

log = StageLogger("reload")

_Found = Wanted | LedgerError


class VersionPoller:
    """The versions that should serve, according to the ledger. Create it in the event loop that uses it."""

    def __init__(self, ledger: Ledger, interval_s: float, background: Background) -> None:
        self._connection = DedicatedConnection(ledger)
        self._interval_s = interval_s
        self._found: _Found = Wanted(None, {})
        self._last = Wanted(None, {})  # the last result that was no error
        self.revision = 0  # counts changes of the result, and calls of `wake`
        self._changed = asyncio.Event()
        self._waiters: deque[asyncio.Future[None]] = deque()  # always the same object: both threads use it
        self._wake = threading.Event()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._thread = background.start_thread("version-poller", self._run)

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def wanted(self) -> VersionRow | None:
        """Return the version that should serve, by the last query. Raises LedgerError if that failed."""
        if isinstance(self._found, LedgerError):
            raise LedgerError(str(self._found)) from self._found
        return self._found.version

    @property
    def shares(self) -> dict[int, float]:
        """Shares of several versions, by the last query that did not fail; empty if one version should serve."""
        return self._last.shares

    @property
    def leading(self) -> int | None:
        """The version that should answer chats that name none, by the last query that did not fail."""
        return None if self._last.version is None else self._last.version.version

    async def refresh(self) -> None:
        """Query the ledger now, and wait for the result."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    def wake(self) -> None:
        """Wake the waiters for a change: something else has changed."""
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, since: int, timeout_s: float) -> None:
        """Wait until the revision changes, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.revision == since:
                    await self._changed.wait()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            waiters = [self._waiters.popleft() for _ in range(len(self._waiters))]
            found = self._query()
            if waiters or not _is_same(found, self._found):
                self._loop.call_soon_threadsafe(self._announce, found, waiters)
            self._wake.wait(until_next_tick(self._interval_s))
        self._connection.close()

    def _query(self) -> _Found:
        try:
            return self._connection.fetch(wanted_versions)
        except LedgerError as error:
            return error

    def _announce(self, found: _Found, waiters: list[asyncio.Future[None]]) -> None:
        if not _is_same(found, self._found):
            if isinstance(found, LedgerError):  # once per outage; the writer logs that nothing can be written
                log.warning("the ledger is unavailable: new versions are not seen", reason=str(found))
            self.wake()
        self._found = found
        if isinstance(found, Wanted):
            self._last = found
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _is_same(one: _Found, other: _Found) -> bool:
    return one == other or (isinstance(one, LedgerError) and isinstance(other, LedgerError))
