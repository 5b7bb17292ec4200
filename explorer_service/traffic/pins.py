"""The versions that callers name, where engines load adapters: brought into service on demand, and kept for a while.

A pin is a lease on the version in the ledger, so that its files stay and every explorer's engines learn of it. It ends
`unpin_after_s` after its last use. Whoever owns an engine brings pinned versions in (reload/adapter_controller.py).
"""

from __future__ import annotations

import asyncio
import time

from sqlalchemy import Connection

from explorer_service.engines.pool import EnginePool
from explorer_service.errors import VersionNotServed
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.reload.poller import VersionPoller
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.queries import find_versions, versions_on_disk
from shared.log import StageLogger

log = StageLogger("traffic")
_MOST_NAMED = 20  # versions, in an error


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
        """explorer: its name in the ledger."""
        self._pool = pool
        self._reader = reader
        self._writer = writer
        self._poller = poller
        self._explorer = explorer
        self._unpin_after_s = unpin_after_s
        self._used_at: dict[int, float] = {}  # time.monotonic(); by version
        self._renewed_at = 0.0

    async def use(self, version: int) -> None:
        """A request names the version: it is to be in service. Waits for the ledger, unless it is pinned and served.

        Raises VersionNotServed when there is no such version to be had, LedgerError.
        """
        if version == 0:  # every engine serves the base
            return
        if version not in self._used_at or not self._pool.serves(version):
            reason = await self._reader.read(lambda connection: _reason_against(connection, version))
            if reason is None and not await self._writer.write(lambda connection: self._lease(connection, version)):
                reason = f"version {version} is not on disk any more"
            if reason is not None:
                raise VersionNotServed(reason)
            self._pool.pinned.add(version)
            self._poller.wake()
        self._used_at[version] = time.monotonic()

    async def run(self) -> None:
        """Renew the pins that are used, and forget the others."""
        while True:
            await asyncio.sleep(min(5.0, self._unpin_after_s / 4))
            try:
                await self._renew()
            except LedgerError as error:
                log.debug("pins are not renewed: the ledger is unavailable", reason=str(error))

    async def _renew(self) -> None:
        now = time.monotonic()
        for version in [v for v, used_at in self._used_at.items() if used_at < now - self._unpin_after_s]:
            del self._used_at[version]
            self._pool.pinned.discard(version)
        used = [version for version, used_at in self._used_at.items() if used_at >= self._renewed_at]
        if used:
            await self._writer.write(lambda connection: [self._lease(connection, version) for version in used])
        self._renewed_at = now

    def _lease(self, connection: Connection, version: int) -> bool:
        return transitions.pin_version(connection, version, explorer=self._explorer, lasts_s=self._unpin_after_s)


def _reason_against(connection: Connection, version: int) -> str | None:
    """Why there is no such version to be had; None: there is."""
    row = find_versions(connection, [version]).get(version)
    if row is not None and row.may_be_pinned:
        return None
    there = f"on disk: {versions_on_disk(connection)[-_MOST_NAMED:]}"
    if row is None:
        return f"version {version} does not exist; {there}"
    if not row.has_files:
        return f"version {version} is not on disk any more; {there}"
    return f"version {version} is {row.state} and does not serve ({row.reason}); {there}"
