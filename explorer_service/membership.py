"""Membership: explorers on one ledger behave as one, so each has to know which others are alive.

Owns this explorer's heartbeat, which costs one small write every two seconds, and reads the database's clock with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import Connection

from explorer_service.ledger_writer import LedgerWriter
from shared import clock
from shared.clock import until_next_tick
from shared.config import differences
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.connect import database_clock
from shared.ledger.queries import Followed
from shared.log import StageLogger
from shared.process import process_name

log = StageLogger("explorer")

HEARTBEAT_S = 2.0
NOTICED_S = 1.5 * HEARTBEAT_S  # an explorer learns of a new one at its next heartbeat, if that is not late


class Membership:
    """This explorer and its knowledge of the others. `run()` ends only by cancellation."""

    def __init__(self, writer: LedgerWriter, settings: dict[str, Any]) -> None:
        """settings: the ones that must be equal in all explorers, by key."""
        self.id = process_name()
        self.differing: dict[str, str] = {}  # by explorer: the differences of its settings
        self.is_alone = True  # as of the last heartbeat
        self.heartbeat_at = 0.0  # clock.since_boot_s(): when the last stored heartbeat was sent
        self.noticed_at = 0.0  # time.monotonic(): from then on the others know this explorer
        self._clock_s = time.time() - clock.since_boot_s()  # from the first heartbeat on, database_clock()
        self.owned: frozenset[str] = frozenset()  # engines that this explorer owned then
        self.acknowledged: dict[str, Followed] = {}  # by engine: how far this explorer has followed it
        self.on_first_other: Callable[[], Awaitable[None]] | None = None  # called when it is no longer alone
        self.on_heartbeat: Callable[[], Awaitable[None]] | None = None  # called after each heartbeat of `run`
        self._writer = writer
        self._settings = settings

    def now(self) -> float:
        """Return Unix seconds by the database's clock, without asking it: chats are stored with this time."""
        return self._clock_s + clock.since_boot_s()

    async def run(self) -> None:
        """Send heartbeats."""
        while True:
            try:
                await self.heartbeat()
                if self.on_heartbeat is not None:
                    await self.on_heartbeat()
            except LedgerError as error:
                log.debug("no heartbeat was stored: the ledger is unavailable", reason=str(error))
            await asyncio.sleep(until_next_tick(HEARTBEAT_S))

    async def heartbeat(self) -> None:
        """Store that this explorer is alive and which moves it has followed, and read which others are alive."""
        sent_at = clock.since_boot_s()
        acknowledged = dict(self.acknowledged)

        def beat(connection: Connection) -> tuple[dict[str, dict[str, Any]], frozenset[str], float]:
            others = transitions.heartbeat(connection, self.id, acknowledged, self._settings)
            return others, queries.owned_engines(connection, self.id), database_clock(connection)

        others, self.owned, self._clock_s = await self._writer.write(beat)
        was_alone, self.is_alone = self.is_alone, not others
        if not self.heartbeat_at and others:
            self.noticed_at = time.monotonic() + NOTICED_S
        self.heartbeat_at = sent_at
        if was_alone and others and self.on_first_other is not None:
            try:
                await self.on_first_other()
            except LedgerError:
                self.is_alone = True  # the next heartbeat tries again
                raise
        self._note_differences(others)

    async def noticed(self) -> None:
        """Wait until the others know this explorer: they announce their streams then, and wait for its streams.

        An explorer that was alone before did neither.
        """
        await asyncio.sleep(max(0.0, self.noticed_at - time.monotonic()))

    def _note_differences(self, others: dict[str, dict[str, Any]]) -> None:
        """Log once for each other explorer how its settings differ."""
        differing = {
            other: found for other, settings in others.items() if (found := differences(self._settings, settings))
        }
        for other, found in differing.items():
            if self.differing.get(other) != found:
                log.error("another explorer of this ledger has other settings", other=other, differences=found)
        self.differing = differing

    async def leave(self) -> None:
        """Sign off, which frees the leases of this explorer at once."""
        try:
            await self._writer.write(lambda connection: transitions.sign_off(connection, self.id))
        except LedgerError as error:
            log.warning("not signed off; this explorer's leases expire by themselves", reason=str(error))
