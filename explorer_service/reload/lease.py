"""One engine at a time takes up a version, of all engines that share a ledger, so that the others serve meanwhile."""

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
_POLL_S = 0.2  # how often a lease that another explorer has is asked for


class ReloadLease:
    """The right to reload one of this explorer's engines. Heartbeats renew it."""

    def __init__(self, writer: LedgerWriter, membership: Membership) -> None:
        self._writer = writer
        self._owner = membership.id
        self._lock = asyncio.Lock()
        self._is_left = False  # the lease may be ours; it stays so when the ledger is away at a reload's end

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Around a reload. Raises LedgerError."""
        async with self._lock:
            self._is_left = True
            try:
                acquire = partial(transitions.acquire_lease, name=LEASE, owner=self._owner)
                while not await self._writer.write(acquire):  # noqa: ASYNC110 — another process has it
                    await asyncio.sleep(_POLL_S)
                yield
            finally:
                await self._release()

    def renew(self, connection: Connection) -> bool:
        """Whether the lease is still ours, in a transaction of whoever is about to pause an engine."""
        return transitions.renew_lease(connection, LEASE, self._owner)

    async def settle(self) -> None:
        """Give the lease back if that failed before."""
        if self._is_left and not self._lock.locked():
            await self._release()

    async def _release(self) -> None:
        try:
            await self._writer.write(lambda c: transitions.release_lease(c, LEASE, self._owner))
        except LedgerError:
            return  # settle() tries again
        self._is_left = False
