"""Looking for new versions: the newest in the ledger, asked for by a thread of its own, once for all engines.

The event loop hears of it only when something has changed. (A process that is awake seldom finds its caches cold each
time: twice a second through the loop, looking took 2 ms of CPU a second of an idle explorer.)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, newest_version
from shared.lifecycle import until_next
from shared.log import StageLogger

log = StageLogger("watch")
_Found = VersionRow | LedgerError | None


class VersionWatch:
    """The newest version of the ledger. `start()` in the event loop, then `newest()`, `turned()`, `look()`."""

    def __init__(self, ledger: Ledger, interval_s: float) -> None:
        self._connection = ledger.keep()
        self._interval_s = interval_s
        self._found: _Found = None
        self.turn = 0  # counts the times that something else was found
        self._turned = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="version-watch", daemon=True)

    async def start(self) -> None:
        """Begin; returns after the first look."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.look()

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def newest(self) -> VersionRow | None:
        """The version that should serve, as of the last look. Raises LedgerError when that found the ledger away."""
        if isinstance(self._found, LedgerError):
            raise self._found
        return self._found

    async def look(self) -> None:
        """Look now, and return when that is done."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    async def turned(self, since: int, timeout_s: float) -> None:
        """Until something else is found than at that turn, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.turn == since:
                    await self._turned.wait()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            waiters, self._waiters = self._waiters, []
            found = self._look()
            if waiters or not _is_same(found, self._found):
                self._loop.call_soon_threadsafe(self._tell, found, waiters)
            self._wake.wait(until_next(self._interval_s))
        self._connection.close()

    def _look(self) -> _Found:
        try:
            return newest_version(self._connection)
        except LedgerError as error:
            return error
        except Exception as error:  # the boundary of this thread: without looks no version would ever be taken up
            log.exception("a look for new versions failed")
            return LedgerError(f"a look for new versions failed ({error!r}); the log has the details")

    def _tell(self, found: _Found, waiters: list[asyncio.Future[None]]) -> None:
        if not _is_same(found, self._found):
            self.turn += 1
            self._turned.set()
            self._turned = asyncio.Event()
        self._found = found
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _is_same(one: _Found, other: _Found) -> bool:
    return one == other or (isinstance(one, LedgerError) and isinstance(other, LedgerError))
