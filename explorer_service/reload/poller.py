"""Poll the ledger for the versions that should serve, in one thread for all engines."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from shared.clock import until_next_tick
from shared.errors import LedgerError
from shared.ledger.connect import DedicatedConnection, Ledger
from shared.ledger.queries import VersionRow, Wanted, wanted_versions
from shared.log import StageLogger

log = StageLogger("reload")

_Found = Wanted | LedgerError


class VersionPoller:
    """The versions that should serve, according to the ledger. `run()` ends only by cancellation."""

    def __init__(self, ledger: Ledger, interval_s: float) -> None:
        self._connection = DedicatedConnection(ledger)
        self._thread = ThreadPoolExecutor(1, "version-poller")  # of all its queries: each begins after it is asked for
        self._interval_s = interval_s
        self._found: _Found = Wanted(None, {})
        self._last = Wanted(None, {})  # the last result that was no error
        self.revision = 0  # counts changes of the result, and calls of `wake`
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Query the ledger regularly."""
        while True:
            await self.refresh()
            await asyncio.sleep(until_next_tick(self._interval_s))

    async def stop(self) -> None:
        """Wait for a query that runs, and close the connection."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

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
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._query)
        before, self._found = self._found, found
        if isinstance(found, Wanted):
            self._last = found
        elif isinstance(before, LedgerError):
            return
        else:  # once per outage; the writer logs that nothing can be written
            log.warning("the ledger is unavailable: new versions are not seen", reason=str(found))
        if found != before:
            self.wake()

    def _query(self) -> _Found:
        try:
            return self._connection.fetch(wanted_versions)
        except LedgerError as error:
            return error

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
