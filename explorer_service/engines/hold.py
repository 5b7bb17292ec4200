"""Holding back what an engine sends while its new weights are not proven."""

from __future__ import annotations

import asyncio
import math
import time

from explorer_service.errors import WeightsUnproven


class Hold:
    """Shared by all requests that an engine has at the same time. Whoever passes their replies on looks at `is_on`.

    What comes while it is on stays unread, so that the connection's own bound holds for it.
    """

    __slots__ = ("_changed", "_spoiled", "is_on", "since")

    def __init__(self) -> None:
        self.is_on = False
        self.since = -math.inf  # time.monotonic(): when replies last began to wait
        self._spoiled: str | None = None  # the reason
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """From now on replies wait."""
        if not self.is_on:
            self.is_on, self.since = True, time.monotonic()

    def release(self) -> None:
        """The weights are proven: replies go on."""
        self.is_on = False
        self._wake()

    def spoil(self, reason: str) -> None:
        """The weights are not what they should be: these requests end with an error, now or when they come here."""
        self.is_on, self._spoiled = True, reason
        self._wake()

    async def wait(self) -> None:
        """Until replies may go on. Raises WeightsUnproven when they may not."""
        while self.is_on:
            if self._spoiled is not None:
                raise WeightsUnproven(self._spoiled)
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
