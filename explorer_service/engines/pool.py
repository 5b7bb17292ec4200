"""The engines and who sits at them: least loaded first, none while it takes up a version.

Owns each engine's state and its count of requests in flight. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from explorer_service.errors import ApiError, unavailable
from shared.config import EngineAddress
from shared.experience import Sampling


class EngineState(StrEnum):
    AWAY = "away"  # does not answer
    CHECKING = "checking"  # answers; what it serves is not proven yet
    SERVING = "serving"  # proven to serve `version`
    RELOADING = "reloading"  # taking up a version; takes no new requests


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as the pool knows it."""

    name: str
    url: str
    state: EngineState = EngineState.AWAY
    version: int | None = None
    in_flight: int = 0
    seeded_in_flight: int = 0  # with `seed`: a CPU engine dies when paused under one
    sampling_defaults: Sampling = field(default_factory=Sampling)  # what it applies where a request says nothing
    reason: str = "not seen yet"


@dataclass(slots=True)
class Seat:
    """A request's place at an engine."""

    engine: Engine
    version: int  # in service there when the request began

    @property
    def version_now(self) -> int:
        """In service there now: another one when weights changed meanwhile."""
        return self.version if self.engine.version is None else self.engine.version


class EnginePool:
    """Seats for chats, and the levers that the reloader pulls."""

    def __init__(self, addresses: Iterable[EngineAddress], wait_s: float) -> None:
        self.engines = [Engine(address.name, address.url) for address in addresses]
        self._wait_s = wait_s
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def seat(self, pin: int | None, *, seeded: bool) -> AsyncIterator[Seat]:
        """Sit at the least loaded engine that serves; wait while all are taking up a version.

        Raises ApiError 503 when all engines are away, 404 when none serves the pinned version.
        """
        engine = await self._choose(pin)
        assert engine.version is not None
        engine.in_flight += 1
        engine.seeded_in_flight += seeded
        try:
            yield Seat(engine, engine.version)
        finally:
            engine.in_flight -= 1
            engine.seeded_in_flight -= seeded
            if engine.state is not EngineState.SERVING:
                await self._announce()

    async def _choose(self, pin: int | None) -> Engine:
        engine = self._least_loaded(pin)  # no lock, no timer in the common case
        if engine is None:
            try:
                async with asyncio.timeout(self._wait_s), self._changed:
                    while (engine := self._least_loaded(pin)) is None:
                        self._raise_unless_soon(pin)
                        await self._changed.wait()
            except TimeoutError:
                message = f"no engine came into service within {self._wait_s:g} s; try again"
                raise unavailable(message, "engines_reloading") from None
        return engine

    def _least_loaded(self, pin: int | None) -> Engine | None:
        serving = [e for e in self.engines if e.state is EngineState.SERVING and pin in (None, e.version)]
        return min(serving, key=lambda engine: engine.in_flight, default=None)

    def _raise_unless_soon(self, pin: int | None) -> None:
        if pin is not None and any(e.state is EngineState.SERVING for e in self.engines):
            serving = sorted({e.version for e in self.engines if e.version is not None})
            raise ApiError(
                404,
                f"version {pin} is not in service; in service: {serving}",
                kind="NotFoundError",
                param="model",
                code="version_not_served",
            )
        if all(e.state is EngineState.AWAY for e in self.engines):
            raise unavailable(
                "no engine answers: " + "; ".join(f"{e.name}: {e.reason}" for e in self.engines), "engines_away"
            )

    @property
    def serving(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state is EngineState.SERVING]

    async def set_state(self, engine: Engine, state: EngineState, reason: str = "") -> None:
        """Move an engine, and wake whoever waits for one."""
        engine.state, engine.reason = state, reason
        if state in (EngineState.AWAY, EngineState.CHECKING):
            engine.version = None
        await self._announce()

    async def wait_drained(self, engine: Engine, timeout_s: float) -> bool:
        """Until nothing is in flight there; False when `timeout_s` ran out first."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: engine.in_flight == 0)
        except TimeoutError:
            return False
        return True

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()
