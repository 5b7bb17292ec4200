"""The engines and who sits at them: least loaded first, none while it takes up a version.

Owns each engine's state and its count of requests in flight. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from explorer_service.errors import ApiError, unavailable
from shared.config import EngineAddress
from shared.experience import Sampling

AFFINITY_SLACK = 4  # requests that a conversation's own engine may have more in flight than the least loaded one


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
    state: EngineState = EngineState.CHECKING  # until the first look: chats that come before it wait
    version: int | None = None
    in_flight: int = 0
    seeded_in_flight: int = 0  # with `seed`: a CPU engine dies when paused under one
    sampling_defaults: Sampling = field(default_factory=Sampling)  # what it applies where a request says nothing
    reason: str = "not seen yet"
    answered_at: float = -math.inf  # time.monotonic(): a chat, or a part of one


@dataclass(slots=True)
class Seat:
    """A request's place at an engine."""

    engine: Engine
    version: int  # in service there when the request began
    seeded: bool = False
    engine_s: float = 0.0  # how long the engine had the request

    @property
    def version_now(self) -> int:
        """In service there now: another one when weights changed meanwhile."""
        return self.version if self.engine.version is None else self.engine.version


class EnginePool:
    """Seats for chats, and the levers that the reloader pulls."""

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        wait_s: float,
        *,
        max_in_flight: int | None = None,
        max_waiting: int = 1000,
    ) -> None:
        self.engines = [Engine(address.name, address.url) for address in addresses]
        self._wait_s = wait_s
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._waiting = 0
        self._changed = asyncio.Event()  # the next change

    async def take(
        self, pin: int | None, *, seeded: bool = False, affinity: int = 0, avoid: Collection[Engine] = ()
    ) -> Seat:
        """A place at an engine that serves, to be given back; wait while all are taking up a version, or full.

        affinity: chats of one number prefer the same engine, whose cache holds their prefix. avoid: engines that this
        chat has lost already. Raises ApiError 503 when all engines are away, or too many chats wait; 404 when none
        serves the pinned version.
        """
        engine = self._choose(pin, affinity, avoid)  # no lock, no timer in the common case
        if engine is None:
            engine = await self._wait_for(pin, affinity, avoid)
        assert engine.version is not None
        engine.in_flight += 1
        engine.seeded_in_flight += seeded
        return Seat(engine, engine.version, seeded)

    def give_back(self, seat: Seat) -> None:
        """The request is through."""
        engine = seat.engine
        engine.in_flight -= 1
        engine.seeded_in_flight -= seat.seeded
        if self._waiting or engine.state is not EngineState.SERVING:
            self._announce()

    async def _wait_for(self, pin: int | None, affinity: int, avoid: Collection[Engine]) -> Engine:
        if self._waiting >= self._max_waiting:
            raise unavailable(f"{self._waiting} chats wait for an engine already; try again", "overloaded")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                while (engine := self._choose(pin, affinity, avoid)) is None:
                    self._raise_unless_soon(pin, avoid)
                    await self._changed.wait()
                return engine
        except TimeoutError:
            message = f"no engine had room for this chat within {self._wait_s:g} s; try again"
            raise unavailable(message, "engines_busy") from None
        finally:
            self._waiting -= 1

    def _choose(self, pin: int | None, affinity: int, avoid: Collection[Engine]) -> Engine | None:
        """The least loaded engine, or the one that this conversation prefers, while that is hardly more loaded."""
        free = [
            e
            for e in self.engines
            if e.state is EngineState.SERVING
            and pin in (None, e.version)
            and e not in avoid
            and (self._max_in_flight is None or e.in_flight < self._max_in_flight)
        ]
        if len(free) < 2:
            return free[0] if free else None
        least = min(free, key=lambda engine: engine.in_flight)
        # rendezvous hashing (Thaler and Ravishankar 1998): when an engine goes, only its own conversations move
        preferred = max(free, key=lambda engine: crc32(engine.name.encode(), affinity & 0xFFFFFFFF))
        return preferred if preferred.in_flight <= least.in_flight + AFFINITY_SLACK else least

    def _raise_unless_soon(self, pin: int | None, avoid: Collection[Engine]) -> None:
        if pin is not None and any(e.state is EngineState.SERVING for e in self.engines) and not self._serves(pin):
            serving = sorted({e.version for e in self.engines if e.version is not None})
            raise ApiError(
                404,
                f"version {pin} is not in service; in service: {serving}",
                kind="NotFoundError",
                param="model",
                code="version_not_served",
            )
        if all(e.state is EngineState.AWAY or e in avoid for e in self.engines):
            raise unavailable(
                "no engine answers: " + "; ".join(f"{e.name}: {e.reason}" for e in self.engines), "engines_away"
            )

    def _serves(self, pin: int) -> bool:
        return any(e.state is EngineState.SERVING and e.version == pin for e in self.engines)

    def has_other(self, lost: Collection[Engine]) -> bool:
        """Whether any engine but these serves, or will soon."""
        return any(e not in lost and e.state in (EngineState.SERVING, EngineState.RELOADING) for e in self.engines)

    @property
    def serving(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state is EngineState.SERVING]

    def set_state(self, engine: Engine, state: EngineState, reason: str = "") -> None:
        """Move an engine, and wake whoever waits for one."""
        engine.state, engine.reason = state, reason
        if state in (EngineState.AWAY, EngineState.CHECKING):
            engine.version = None
        self._announce()

    async def wait_drained(self, engine: Engine, timeout_s: float) -> bool:
        """Until nothing is in flight there; False when `timeout_s` ran out first."""
        try:
            async with asyncio.timeout(timeout_s):
                while engine.in_flight:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
