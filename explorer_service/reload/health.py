"""Check, about once a second, that an engine is alive, makes progress, and holds the version that it serves."""

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
_POLL_S = 0.1
STALLED_AFTER_S = 10.0  # if chats get no answer for so long, the engine may have been paused from outside


class EngineHealth:
    """Checks one engine; its controller reacts."""

    def __init__(self, engine: Engine, admin: EngineAdmin, leases: EngineLeases) -> None:
        self._engine = engine
        self._admin = admin
        self._leases = leases
        self._healthy_at = 0.0  # time.monotonic()
        self._progress_at = time.monotonic()  # when no chat waited, or the engine was resumed

    async def check(self) -> None:
        """Check the health of an engine that has not just answered a chat. Raises EngineUnavailable."""
        answered_at = max(self._healthy_at, self._engine.answered_at)
        if not self._engine.is_open or time.monotonic() - answered_at > HEALTH_INTERVAL_S:
            was_away = self._engine.state is EngineState.UNAVAILABLE
            await self._admin.check_health()
            if self._engine.state is EngineState.UNAVAILABLE and not was_away:
                raise EngineUnavailable(self._engine.reason)  # a chat lost it meanwhile; the answer may be older
            self._healthy_at = time.monotonic()
            await self._resume_if_stalled()

    async def _resume_if_stalled(self) -> None:
        """Resume an engine whose chats get no answer, which is harmless if it is not paused.

        Only its owner may do this: if another explorer loads a version, vLLM would sample during the load, and die.
        """
        engine, now = self._engine, time.monotonic()
        if not (engine.in_flight and engine.is_open and self._leases.holds(engine.url)):
            self._progress_at = now
        elif now - max(self._progress_at, engine.answered_at) > STALLED_AFTER_S:
            self._progress_at = now
            await self._admin.resume()

    async def find_other_weights(self, served: TargetVersion | None) -> str | None:
        """Return the label of an open engine if it is not that of the served version.

        Another explorer may have loaded a version after it was suspended, or the engine may have restarted.
        """
        if served is None or not self._engine.is_open or self._engine.version != served.version:
            return None
        try:
            label = await self._admin.read_label()
        except (EngineRefused, EngineTimeout):
            return None  # unknown for now
        return None if label in (None, served.label) else label

    async def is_contradicted(self, target: TargetVersion) -> bool:
        """Whether an open engine, which does not prove the target that it serves, holds other weights.

        Not if it has no label, or serves the weights that it was started with, which nobody has proven.
        """
        if not self._engine.is_open:
            return False
        label = await self._admin.read_label()
        return label == target.label or (label is not None and target.version != 0)


@asynccontextmanager
async def while_open(engine: Engine) -> AsyncIterator[None]:
    """Run the block while the engine serves, and cancel it if the engine goes out of service: that is more urgent.

    Raises EngineUnavailable; NotOwner if another explorer moved the engine while this one was suspended
    (standstill.py).
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
    while engine.is_open:  # noqa: ASYNC110 — the pool changes often
        await asyncio.sleep(_POLL_S)
    limit.reschedule(asyncio.get_running_loop().time())
