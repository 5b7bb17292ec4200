"""Check, about once a second, that an engine is alive, makes progress, and holds the version that it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import EngineRefused, EngineTimeout, EngineUnavailable, NotOwner, OtherWeights
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.reloading import Reloading
from shared.clock import until_next_tick
from shared.errors import EngineError

HEALTH_INTERVAL_S = 1.0
_POLL_S = 0.1
STALLED_AFTER_S = 10.0  # if chats get no answer for so long, the engine may have been paused from outside


class EngineHealth:
    """Checks one engine; its controller reacts."""

    def __init__(self, engine: Engine, admin: EngineAdmin, reloading: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._leases = reloading.leases
        self._has_label = not reloading.loads_adapters  # otherwise its version is read from its adapters' names
        self._healthy_at = 0.0  # time.monotonic()
        self._progress_at = time.monotonic()  # when no chat waited, or the engine was resumed

    async def check(self) -> None:
        """Check the health of an engine that has not just answered a chat, and note its own name before it is opened.

        Raises EngineUnavailable, LedgerError; EngineRefused if it does not tell its name.
        """
        answered_at = max(self._healthy_at, self._engine.answered_at)
        if not self._engine.is_open or time.monotonic() - answered_at > HEALTH_INTERVAL_S:
            was_away = self._engine.state is EngineState.UNAVAILABLE
            await self._admin.check_health()
            if self._engine.state is EngineState.UNAVAILABLE and not was_away:
                raise EngineUnavailable(self._engine.reason)  # a chat lost it meanwhile; the answer may be older
            self._healthy_at = time.monotonic()
            if not self._engine.is_open:
                await self._leases.identify(self._engine.url, await self._admin.read_identity())
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

    async def require_weights(self, served: TargetVersion | None) -> None:
        """Raise OtherWeights if the label of an open engine is not that of the served version.

        Another explorer may have loaded a version after it was suspended, or the engine may have restarted.
        """
        if not self._has_label or served is None or not self._engine.is_open or self._engine.version != served.version:
            return
        try:
            label = await self._admin.read_label()
        except (EngineRefused, EngineTimeout):
            return  # unknown for now
        if label not in (None, served.label):
            raise OtherWeights(f"it holds {label!a}, but serves version {served.version}")

    async def look(self, served: TargetVersion | None) -> None:
        """Check an engine that waits for its turn. Raises EngineUnavailable, OtherWeights."""
        await self.check()
        if self._leases.holds(self._engine.url):  # otherwise another explorer may have moved it
            await self.require_weights(served)

    async def is_contradicted(self, target: TargetVersion) -> bool:
        """Whether an open engine, which does not prove the target that it serves, holds other weights.

        Not if it has no label, or serves the weights that it was started with, which nobody has proven.
        """
        if not self._engine.is_open:
            return False
        label = await self._admin.read_label()
        return label == target.label or (label is not None and target.version != 0)


@asynccontextmanager
async def while_open(engine: Engine, look: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[None]:
    """Run the block while the engine serves, and cancel it if the engine goes out of service: that is more urgent.

    look: called about once a second meanwhile; if it raises an error, that ends the block and is raised here. Raises
    EngineUnavailable; NotOwner if another explorer moved the engine while this one was suspended (standstill.py).
    """
    if not engine.is_open:
        yield
        return
    found: list[EngineError] = []
    try:
        async with asyncio.timeout(None) as limit:
            watches = [asyncio.create_task(_end_when_closed(engine, limit), name=f"watch-{engine.name}")]
            if look is not None:
                watches.append(asyncio.create_task(_end_when_wrong(look, found, limit), name=f"look-{engine.name}"))
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()
    except TimeoutError as exc:
        if found:
            raise found[0] from exc
        kind = NotOwner if engine.state is EngineState.RELOADING else EngineUnavailable
        raise kind(engine.reason) from exc


async def _end_when_closed(engine: Engine, limit: asyncio.Timeout) -> None:
    while engine.is_open:  # noqa: ASYNC110 — the pool changes often
        await asyncio.sleep(_POLL_S)
    _end(limit)


async def _end_when_wrong(
    look: Callable[[], Awaitable[None]], found: list[EngineError], limit: asyncio.Timeout
) -> None:
    while not found:
        await asyncio.sleep(until_next_tick(HEALTH_INTERVAL_S))
        try:
            await look()
        except EngineError as error:
            found.append(error)
    _end(limit)


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():  # the block may take some time to end
        limit.reschedule(asyncio.get_running_loop().time())
