"""Hold back replies of an engine while its new weights are not proven."""

from __future__ import annotations

import asyncio
import math

from explorer_service.errors import WeightsUnproven
from shared import clock


class Hold:
    """Shared by all requests in flight at an engine. Before a reply is forwarded, `is_on` is checked.

    While it is on, replies are not read, so the connection's own limit bounds their memory.
    """

    __slots__ = ("_changed", "_spoiled", "is_on", "since")

    def __init__(self) -> None:
        self.is_on = False
        self.since = -math.inf  # clock.since_boot_s(): when replies last began to wait
        self._spoiled: str | None = None  # the reason
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Hold back replies from now on."""
        if not self.is_on:
            self.is_on, self.since = True, clock.since_boot_s()

    def release(self) -> None:
        """Forward replies again: the weights are proven."""
        self.is_on = False
        self._wake()

    def spoil(self, reason: str) -> None:
        """End these requests with an error, now or in their next `wait`: the weights are wrong."""
        self.is_on, self._spoiled = True, reason
        self._wake()

    def end(self, wrong: str | None) -> None:
        """Release these requests; wrong: why they are spoiled instead."""
        if wrong is None:
            self.release()
        else:
            self.spoil(wrong)

    async def wait(self) -> None:
        """Wait until replies may be forwarded. Raises WeightsUnproven if the weights are wrong."""
        while self.is_on:
            if self._spoiled is not None:
                raise WeightsUnproven(self._spoiled)
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
