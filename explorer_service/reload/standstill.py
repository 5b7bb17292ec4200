"""Detect that this explorer may have missed a reload, because it was suspended or cut off from the ledger.

An owner waits for every explorer whose heartbeat it sees. So what this explorer knows about engines is valid until its
last heartbeat is LIVE_S old, if each heartbeat was sent in time after the previous one. If one was late, because the
process was stopped, the machine slept or the ledger was unavailable, new chats wait until this explorer has read which
engines were moved meanwhile. Replies wait, too, unless only the ledger was unavailable: then they are not recorded.
"""

from __future__ import annotations

import asyncio

from explorer_service.engines.engine import Engine
from explorer_service.engines.pool import EnginePool
from explorer_service.membership import Membership
from explorer_service.reload.ownership import EngineLeases
from shared import clock
from shared.clock import until_next_tick
from shared.errors import LedgerError
from shared.ledger.queries.explorers import LIVE_S
from shared.log import StageLogger

log = StageLogger("reload")

_CHECK_S = 1.0
_CHECK_AGAIN_S = 0.1


class Standstill:
    """Detects late heartbeats. `run()` ends only by cancellation."""

    def __init__(self, pool: EnginePool, membership: Membership, leases: EngineLeases) -> None:
        self._pool = pool
        self._membership = membership
        self._leases = leases
        self._in_time_at = membership.heartbeat_at  # clock.since_boot_s(): the last heartbeat in time
        self._checked_at = clock.since_boot_s()

    async def run(self) -> None:
        """Check every second, and more often while chats wait for it."""
        while True:
            try:
                await self._check()
            except LedgerError as error:
                log.debug("cannot read what engines serve: the ledger is unavailable", reason=str(error))
            is_known = clock.since_boot_s() < self._pool.known_until
            await asyncio.sleep(until_next_tick(_CHECK_S) if is_known else _CHECK_AGAIN_S)

    async def _check(self) -> None:
        membership, now = self._membership, clock.since_boot_s()
        was_suspended = now >= self._checked_at + LIVE_S
        was_late = not membership.is_alone and membership.heartbeat_at >= self._in_time_at + LIVE_S
        if not was_suspended:
            self._checked_at = now
            self._pool.know_until(self._pool.known_until, now + LIVE_S)
        if was_suspended or was_late:
            self._pool.know_until(now, now if was_suspended else now + LIVE_S)
            try:
                await membership.heartbeat()  # from now on, owners wait for this explorer
                await self._catch_up()
            except LedgerError:
                if not membership.is_alone:
                    raise
        self._in_time_at, self._checked_at = membership.heartbeat_at, now
        self._pool.know_until((now if membership.is_alone else membership.heartbeat_at) + LIVE_S, now + LIVE_S)

    async def _catch_up(self) -> None:
        """Close engines that were moved meanwhile, and hold back their replies, until their controllers follow."""
        for engine in self._pool.engines:
            if engine.is_open and not await self._is_unmoved(engine):
                log.warning("the engine was moved while this explorer sent no heartbeats", engine=engine.name)
                self._pool.hold_back(engine)
                self._pool.close(engine, "it was moved while this explorer sent no heartbeats")

    async def _is_unmoved(self, engine: Engine) -> bool:
        """Whether this explorer made or followed the engine's last move, and has not lost its ownership."""
        row = await self._leases.read(engine.url)
        if row is None or row.generation != self._leases.known_generation(engine.url):
            return False
        return self._leases.holds(engine.url) or not self._leases.believes_to_own(engine.url)
