"""Pins: adapter versions that callers name are loaded on demand, and kept for a while.

A pin is a lease on the version in the ledger: it keeps the files, and all explorers see it. It ends `unpin_after_s`
after its last use; a request that waits for the version counts as use. The owner of each engine loads the pinned
versions (reload/adapter_controller.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import Connection

from explorer_service.engines.pool import EnginePool
from explorer_service.errors import VersionNotServed, without_addresses
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.reload.poller import VersionPoller
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.queries import reason_against_serving
from shared.log import StageLogger

log = StageLogger("traffic")


class Pins:
    """The pins of this explorer. `run()` ends only by cancellation."""

    def __init__(
        self,
        pool: EnginePool,
        reader: LedgerReader,
        writer: LedgerWriter,
        poller: VersionPoller,
        explorer: str,
        unpin_after_s: float,
    ) -> None:
        """explorer: this explorer's name in the ledger. unpin_after_s: how long a pin lasts after its last use."""
        self._pool = pool
        self._reader = reader
        self._writer = writer
        self._poller = poller
        self._explorer = explorer
        self._unpin_after_s = unpin_after_s
        self._tick_s = min(5.0, unpin_after_s / 4)
        self._used_at: dict[int, float] = {}  # time.monotonic(); by version
        self._waiting: Counter[int] = Counter()  # requests that wait for an engine; by version
        self._renewed_at = 0.0

    @asynccontextmanager
    async def use(self, version: int) -> AsyncIterator[None]:
        """Pin the version that a request names. Inside this block, the request waits for an engine.

        Writes to the ledger unless the version is served already, and pinned for some time yet. Raises
        VersionNotServed if the version cannot be served, LedgerError.
        """
        if version == 0:  # every engine serves the base
            yield
            return
        self._waiting[version] += 1
        try:
            if self._ends_soon(version) or not self._pool.serves(version):
                await self._pin(version)
            self._used_at[version] = time.monotonic()
            yield
        finally:
            self._waiting[version] -= 1

    async def _pin(self, version: int) -> None:
        reason = await self._reader.read(lambda connection: reason_against_serving(connection, version))
        if reason is None and not await self._writer.write(lambda connection: self._lease(connection, version)):
            reason = f"version {version} is not on disk any more"
        if reason is not None:
            raise VersionNotServed(without_addresses(reason))
        self._pool.pinned.add(version)
        self._poller.wake()

    def _ends_soon(self, version: int) -> bool:
        """Whether there is no pin, or one that may end before the next round renews it."""
        used_at = self._used_at.get(version, -math.inf)
        return used_at < time.monotonic() - self._unpin_after_s + 2 * self._tick_s

    async def run(self) -> None:
        """Renew the pins in use, and drop the others."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                await self._renew()
            except LedgerError as error:
                log.debug("pins are not renewed: the ledger is unavailable", reason=str(error))

    async def _renew(self) -> None:
        now = time.monotonic()
        self._waiting = +self._waiting
        waiting = self._used_at.keys() & self._waiting.keys()
        # only pins that are about to end: engines load the last used ones, and would alternate between waiting ones
        self._used_at |= {version: now for version in waiting if self._ends_soon(version)}
        given_up: list[int] = []
        if waiting:  # the owner of an engine may have rejected or failed what this explorer's requests wait for
            given_up = await self._reader.read(lambda c: [v for v in waiting if reason_against_serving(c, v)])
        expired = [v for v, used_at in self._used_at.items() if used_at < now - self._unpin_after_s]
        for version in {*expired, *given_up}:
            self._drop(version)
        used = [version for version, used_at in self._used_at.items() if used_at >= self._renewed_at]
        if used:
            renewed = await self._writer.write(lambda c: [v for v in used if self._extend(c, v, v in waiting)])
            for version in set(used).difference(renewed, +self._waiting):
                self._drop(version)
        self._renewed_at = now

    def _drop(self, version: int) -> None:
        """Remove a pin that has expired, or whose version was given up. The next use pins the version again."""
        del self._used_at[version]
        self._pool.unpin(version)

    def _extend(self, connection: Connection, version: int, is_waited_for: bool) -> bool:
        """Renew a pin; for a waiting request, also pin the version again. Returns False if the pin has expired."""
        if is_waited_for:
            return self._lease(connection, version)
        return transitions.renew_pin(connection, version, explorer=self._explorer, lasts_s=self._unpin_after_s)

    def _lease(self, connection: Connection, version: int) -> bool:
        return transitions.pin_version(connection, version, explorer=self._explorer, lasts_s=self._unpin_after_s)
