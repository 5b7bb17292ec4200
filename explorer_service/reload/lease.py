"""A lease by which only one engine of a ledger is reloaded at a time, so that the others serve meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from sqlalchemy import Connection

from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from shared.errors import LedgerError
from shared.ledger import transitions

LEASE = "reload"
_POLL_S = 0.2  # between requests for a lease that another explorer has


class ReloadLease:
    """The right to reload one of this explorer's engines. Heartbeats renew it."""

    def __init__(self, writer: LedgerWriter, membership: Membership) -> None:
        self._writer = writer
        self._owner = membership.id
        self._lock = asyncio.Lock()
        self._may_be_held = False  # True also after a release that failed, because the ledger was unavailable

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wrap a reload. Raises LedgerError."""
        async with self._lock:
            self._may_be_held = True
            try:
                acquire = partial(transitions.acquire_lease, name=LEASE, owner=self._owner)
                while not await self._writer.write(acquire):  # noqa: ASYNC110 — another process has it
                    await asyncio.sleep(_POLL_S)
                yield
            finally:
                await self._release()

    def renew(self, connection: Connection) -> bool:
        """Renew the lease in the transaction before a pause. Returns whether this explorer still owns it."""
        return transitions.renew_lease(connection, LEASE, self._owner)

    async def settle(self) -> None:
        """Release the lease if that failed before."""
        if self._may_be_held and not self._lock.locked():
            await self._release()

    async def _release(self) -> None:
        try:
            await self._writer.write(lambda c: transitions.release_lease(c, LEASE, self._owner))
        except LedgerError:
            return  # settle() tries again
        self._may_be_held = False
