"""Does this explorer still know what its engines serve? One that stood still may have missed a reload.

An owner waits for every explorer whose heartbeat it sees. So what this explorer knows of an engine holds until its last
heartbeat is LIVE_S old, and for as long as each heartbeat comes in time after the one before. When one did not, because
the process was stopped, the machine slept or the ledger was away, new chats wait until it has been looked up which
engines were moved meanwhile; and so do replies, except while the ledger is away: then they are not recorded anyway.
"""

from __future__ import annotations

import asyncio
import time

from explorer_service.engines.engine import Engine
from explorer_service.engines.pool import EnginePool
from explorer_service.membership import Membership
from explorer_service.reload.ownership import EngineLeases
from shared.clock import SHORT_SLEEP_S, asleep_s, until_next_tick
from shared.errors import LedgerError
from shared.ledger.queries.explorers import LIVE_S
from shared.log import StageLogger

log = StageLogger("reload")

_LOOK_S = 1.0
_LOOK_AGAIN_S = 0.1


class Standstill:
    """Notices that heartbeats did not come in time. `run()` ends only by cancellation."""

    def __init__(self, pool: EnginePool, membership: Membership, leases: EngineLeases) -> None:
        self._pool = pool
        self._membership = membership
        self._leases = leases
        self._in_time_at = membership.heartbeat_at  # time.monotonic(): the last heartbeat that came in time
        self._looked_at = time.monotonic()
        self._asleep_s = asleep_s()

    async def run(self) -> None:
        """Look every second, and more often while chats wait for it."""
        while True:
            try:
                await self._look()
            except LedgerError as error:
                log.debug("what engines serve cannot be looked up: the ledger is unavailable", reason=str(error))
            is_known = time.monotonic() < self._pool.known_until
            await asyncio.sleep(until_next_tick(_LOOK_S) if is_known else _LOOK_AGAIN_S)

    async def _look(self) -> None:
        membership, now, asleep = self._membership, time.monotonic(), asleep_s()
        stood_still = now >= self._looked_at + LIVE_S or asleep > self._asleep_s + SHORT_SLEEP_S
        was_late = not membership.is_alone and membership.heartbeat_at >= self._in_time_at + LIVE_S
        if not stood_still:
            self._looked_at, self._asleep_s = now, asleep
            self._pool.know_until(self._pool.known_until, now + LIVE_S)
        if stood_still or was_late:
            self._pool.know_until(now, now if stood_still else now + LIVE_S)
            try:
                await membership.heartbeat()  # from now on whoever moves an engine waits for this explorer
                await self._catch_up()
            except LedgerError:
                if not membership.is_alone:
                    raise
        self._in_time_at, self._looked_at, self._asleep_s = membership.heartbeat_at, now, asleep
        self._pool.know_until((now if membership.is_alone else membership.heartbeat_at) + LIVE_S, now + LIVE_S)

    async def _catch_up(self) -> None:
        """Engines that were moved meanwhile get no chats, and what they send waits, until their controllers follow."""
        for engine in self._pool.engines:
            if engine.is_open and not await self._is_unmoved(engine):
                log.warning("the engine was moved while this explorer stood still", engine=engine.name)
                self._pool.hold_back(engine)
                self._pool.close(engine, "it was moved while this explorer stood still")

    async def _is_unmoved(self, engine: Engine) -> bool:
        """Whether this explorer has made or followed the engine's last move, and owns it, if it did."""
        row = await self._leases.read(engine.url)
        if row is None or row.generation != self._leases.known_generation(engine.url):
            return False
        return row.owner == self._leases.explorer or not self._leases.believes_to_own(engine.url)
