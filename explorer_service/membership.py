"""Which explorers live: several on one ledger behave as one, and each has to know of the others.

Owns this explorer's heartbeat. Alone on a ledger it costs one small write every two seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import Connection

from explorer_service.ledger_writer import LedgerWriter
from shared.clock import until_next_tick
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.queries import Followed
from shared.log import StageLogger
from shared.process import process_name

log = StageLogger("explorer")

HEARTBEAT_S = 2.0


class Membership:
    """This explorer among the others. `run()` ends only by cancellation."""

    def __init__(self, writer: LedgerWriter, settings: dict[str, Any]) -> None:
        """settings: those in which all explorers must agree, by their keys."""
        self.id = process_name()
        self.differing: dict[str, str] = {}  # explorers that are configured otherwise, and in what
        self.is_alone = True  # as of the last heartbeat
        self.heartbeat_at = 0.0  # time.monotonic(): when the last heartbeat that was stored was sent
        self.owned: frozenset[str] = frozenset()  # engines that this explorer owned then
        self.acknowledged: dict[str, Followed] = {}  # by engine: how far this explorer has followed it
        self.on_company: Callable[[], Awaitable[None]] | None = None  # called when this explorer is alone no more
        self._writer = writer
        self._settings = settings

    async def run(self) -> None:
        """Heartbeats."""
        while True:
            try:
                await self.heartbeat()
            except LedgerError as error:
                log.debug("no heartbeat: the ledger is unavailable", reason=str(error))
            await asyncio.sleep(until_next_tick(HEARTBEAT_S))

    async def heartbeat(self) -> None:
        """Tell the others that this explorer lives and how far it has followed, and see who else lives."""
        sent_at = time.monotonic()
        acknowledged = dict(self.acknowledged)

        def beat(connection: Connection) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
            others = transitions.heartbeat(connection, self.id, acknowledged, self._settings)
            return others, queries.owned_engines(connection, self.id)

        others, self.owned = await self._writer.write(beat)
        was_alone, self.is_alone = self.is_alone, not others
        self.heartbeat_at = sent_at
        if was_alone and others and self.on_company is not None:
            try:
                await self.on_company()
            except LedgerError:
                self.is_alone = True  # the next heartbeat tries again
                raise
        self._compare(others)

    def _compare(self, others: dict[str, dict[str, Any]]) -> None:
        """Say once of each other explorer in what it is configured otherwise."""
        differing = {other: found for other, settings in others.items() if (found := self._differences(settings))}
        for other, found in differing.items():
            if self.differing.get(other) != found:
                log.error("another explorer of this ledger is configured otherwise", other=other, differences=found)
        self.differing = differing

    def _differences(self, settings: dict[str, Any]) -> str:
        """One that says nothing of a key is of an older release."""
        both = ((key, own, settings.get(key, own)) for key, own in self._settings.items())
        return "; ".join(f"{key} is {own!r} here and {theirs!r} there" for key, own, theirs in both if own != theirs)

    async def leave(self) -> None:
        """Sign off: the leases of this explorer are free at once."""
        try:
            await self._writer.write(lambda connection: transitions.sign_off(connection, self.id))
        except LedgerError as error:
            log.warning("not signed off; the others notice by themselves", reason=str(error))
