"""Whether an engine lives, moves, and still holds what it serves. For one engine, about once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import EngineRefused, EngineTimeout, EngineUnavailable, NotOwner
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.ownership import EngineLeases

HEALTH_INTERVAL_S = 1.0
_LOOK_S = 0.1
STALLED_AFTER_S = 10.0  # chats that get no answer for so long may wait in an engine that somebody paused


class EngineHealth:
    """Asks; what follows is the controller's to decide."""

    def __init__(self, engine: Engine, admin: EngineAdmin, leases: EngineLeases) -> None:
        self._engine = engine
        self._admin = admin
        self._leases = leases
        self._healthy_at = 0.0  # time.monotonic()
        self._moved_at = time.monotonic()  # when no chat waited, or the engine was resumed

    async def check(self) -> None:
        """Ask an engine that has not just answered a chat. Raises EngineUnavailable."""
        answered_at = max(self._healthy_at, self._engine.answered_at)
        if not self._engine.is_open or time.monotonic() - answered_at > HEALTH_INTERVAL_S:
            await self._admin.check_health()
            self._healthy_at = time.monotonic()
            await self._resume_if_stalled()

    async def _resume_if_stalled(self) -> None:
        """Chats get no answer, and none of ours paused the engine: resume it, which is harmless when nobody has.

        It is not when another explorer has the engine now and loads a version: vLLM dies of sampling in a load.
        """
        engine, now = self._engine, time.monotonic()
        if not (engine.in_flight and engine.is_open and self._leases.holds(engine.url)):
            self._moved_at = now
        elif now - max(self._moved_at, engine.answered_at) > STALLED_AFTER_S:
            self._moved_at = now
            await self._admin.resume()

    async def find_other_weights(self, served: TargetVersion | None) -> str | None:
        """The label of an open engine that holds other weights than those that it serves.

        Another explorer may have loaded them after it had stood still, or the engine has started anew.
        """
        if served is None or not self._engine.is_open or self._engine.version != served.version:
            return None
        try:
            label = await self._admin.read_label()
        except (EngineRefused, EngineTimeout):
            return None  # it says nothing now
        return None if label in (None, served.label) else label


@asynccontextmanager
async def while_open(engine: Engine) -> AsyncIterator[None]:
    """Around what an engine that serves only waits for: it ends when the engine goes out of service.

    Then bringing it back comes first. Raises EngineUnavailable; NotOwner when another explorer moves it, which was
    noticed after this one had stood still (standstill.py).
    """
    if not engine.is_open:
        yield
        return
    try:
        async with asyncio.timeout(None) as limit:
            watch = asyncio.create_task(_end_when_closed(engine, limit), name=f"watch-{engine.name}")
            try:
                yield
            finally:
                watch.cancel()
    except TimeoutError as exc:
        kind = NotOwner if engine.state is EngineState.RELOADING else EngineUnavailable
        raise kind(engine.reason) from exc


async def _end_when_closed(engine: Engine, limit: asyncio.Timeout) -> None:
    while engine.is_open:  # noqa: ASYNC110 — the pool's changes are many
        await asyncio.sleep(_LOOK_S)
    limit.reschedule(asyncio.get_running_loop().time())
