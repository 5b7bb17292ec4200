"""The pool of engines: their versions, states and load. A request gets the least loaded engine that serves its version.

Owns the state of all engines; other modules change it through the pool. Without HTTP. With full versions, an engine
serves one version. With adapters, it serves a set of versions, and a request's version is chosen before its engine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from explorer_service.engines.affinity import least_loaded
from explorer_service.engines.engine import OPEN, Engine, EngineState
from explorer_service.engines.hold import Hold
from explorer_service.engines.slot import EngineSlot
from explorer_service.engines.soon import none_free, require_soon
from explorer_service.errors import NoEngine, WeightsUnproven
from shared import clock
from shared.config import EngineAddress
from shared.experience import Sampling
from shared.log import StageLogger

log = StageLogger("reload")


class EnginePool:
    """Engine slots for chats, and the state changes of reloads."""

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        wait_s: float,
        *,
        max_in_flight: int | None = None,
        max_waiting: int = 1000,
        adapters: bool = False,
        wanted: Callable[[], int | None] = lambda: None,
        note: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """adapters: engines serve sets of versions. note: called with each engine now, and when its state changes.

        wanted: the version that should answer requests that name none; it does once an engine leads with it.
        """
        self.engines = [Engine(address.name, address.url) for address in addresses]
        self.wait_s = wait_s
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self.waiting = 0  # chats waiting for an engine
        self._adapters, self._wanted = adapters, wanted
        self.pinned: set[int] = set()  # versions that callers name, and that engines have to load
        self._note = note
        self._changed = asyncio.Event()  # the next change
        # By clock.since_boot_s(). After `known_until`, others may have moved engines without this explorer: it sends no
        # chats. After `awake_until`, this explorer was suspended: it forwards no replies before it has caught up.
        self.known_until = self.awake_until = math.inf
        for engine in self.engines:
            note(engine)

    async def acquire(
        self,
        version: int | None,
        wait_s: float | None = None,
        *,
        seeded: bool = False,
        affinity: int = 0,
        avoid: Collection[str] = (),
    ) -> EngineSlot:
        """Take a slot at a serving engine, and wait while all are reloading or full. Release it afterwards.

        version: the version that must answer; None: any. wait_s: None: the configured time. affinity: chats with the
        same number prefer the same engine, whose cache has their prefix. avoid: names of engines that lost this chat
        already. Raises NoEngine if all engines are unavailable or too many chats wait; VersionNotServed.
        """
        engine = self._choose(version, affinity, avoid)  # without lock and timer in the common case
        if engine is None:
            engine = await self._wait_for(version, self.wait_s if wait_s is None else wait_s, affinity, avoid)
        wanted = self._current if version is None else version
        served = engine.version if wanted is None else wanted
        assert served is not None
        slot = EngineSlot(engine, served, engine.versions[served], engine.hold, clock.since_boot_s(), seeded)
        if engine.early_places:
            engine.early_places -= 1
            slot.early_hold = engine.early_hold
        engine.in_flight += 1
        engine.in_flight_of[served] = engine.in_flight_of.get(served, 0) + 1
        engine.seeded_in_flight += seeded
        return slot

    def release(self, slot: EngineSlot) -> None:
        """Release the slot of a request that has ended."""
        engine = slot.engine
        engine.in_flight -= 1
        engine.in_flight_of[slot.version] -= 1
        if not engine.in_flight_of[slot.version]:
            del engine.in_flight_of[slot.version]
        engine.seeded_in_flight -= slot.seeded
        if self.waiting or not engine.is_open:
            self._announce()

    async def _wait_for(self, version: int | None, wait_s: float, affinity: int, avoid: Collection[str]) -> Engine:
        if self.waiting >= self._max_waiting:
            raise NoEngine(f"chats that already wait for an engine: {self.waiting}; try again", "overloaded")
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                while (engine := self._choose(version, affinity, avoid)) is None:
                    require_soon(self.engines, self.pinned, version, avoid)
                    await self._changed.wait()
                return engine
        except TimeoutError:
            raise self._none_free() from None
        finally:
            self.waiting -= 1

    async def wait_open(self, early_hold: Hold) -> None:
        """Wait until the engine of an early chat is open. Raises WeightsUnproven if another one is, NoEngine."""
        try:
            async with asyncio.timeout(self.wait_s):
                await early_hold.wait()
        except TimeoutError:
            raise WeightsUnproven("another engine is open") if self.serving else self._none_free() from None

    def _none_free(self) -> NoEngine:
        return none_free(self.wait_s, is_known=clock.since_boot_s() < self.known_until)

    def _choose(self, version: int | None, affinity: int, avoid: Collection[str]) -> Engine | None:
        """Return the least loaded engine, or the conversation's preferred one if its load is not much higher."""
        if clock.since_boot_s() >= self.known_until:
            return None
        version = self._current if version is None else version
        free = [
            e
            for e in self.serving or [e for e in self.engines if e.early_places]
            if (version is None or version in e.versions)
            and e.name not in avoid
            and (self._max_in_flight is None or e.in_flight < self._max_in_flight)
        ]
        return least_loaded(free, affinity) if len(free) > 1 else next(iter(free), None)

    def serves(self, version: int, avoid: Collection[str] = ()) -> bool:
        """Whether any engine serves the version now. avoid: names of engines that do not count."""
        return any(version in engine.versions for engine in self.serving if engine.name not in avoid)

    def is_ready(self) -> bool:
        """Whether a chat would be answered: an engine serves, or does so again after a take-up that chats wait for."""
        waited_for = time.monotonic() - self.wait_s
        return any(
            e.is_open or (e.state is EngineState.RELOADING and bool(e.versions) and e.closed_at > waited_for)
            for e in self.engines
        )

    def has_other(self, lost: Collection[str]) -> bool:
        """Whether any other engine serves, or is reloading."""
        return any(e.name not in lost and (e.is_open or e.state is EngineState.RELOADING) for e in self.engines)

    @property
    def serving(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state in OPEN]

    def note_answer(self, engine: Engine) -> None:
        """Note that the engine has just sent a reply, or a part of one, which replaces a health check."""
        engine.answered_at = time.monotonic()

    async def wait_awake(self) -> None:
        """Wait until it is known which weights sampled the received data. Raises WeightsUnproven after `wait_s`."""
        try:
            async with asyncio.timeout(self.wait_s):
                while clock.since_boot_s() >= self.awake_until:
                    await self._changed.wait()
        except TimeoutError:
            raise WeightsUnproven("this explorer was suspended, and cannot read what engines serve") from None

    def know_until(self, until: float, awake_until: float) -> None:
        """Set the times, clock.since_boot_s(), until which no other explorer moves an engine without this one."""
        was_known = clock.since_boot_s() < min(self.known_until, self.awake_until)
        self.known_until, self.awake_until = until, awake_until
        if not was_known:
            self._announce()

    def serve(
        self,
        engine: Engine,
        versions: dict[int, str],
        defaults: Sampling,
        degraded: str = "",
        version: int | None = None,
    ) -> None:
        """Open the engine for chats, and forward the replies that were held back.

        versions: what it serves, with the model names. version: for requests that name none; None: the newest one.
        degraded: why it serves an older version than it should; empty if it does not.
        """
        engine.versions, engine.sampling_defaults = versions, defaults
        engine.version = max(versions) if version is None else version
        engine.hold.release()
        self._move(engine, EngineState.DEGRADED if degraded else EngineState.SERVING, degraded)

    def close(self, engine: Engine, reason: str) -> None:
        """Send the engine no new chats during a take-up; waiting chats continue to wait."""
        if engine.is_open:
            engine.closed_at = time.monotonic()
        self._move(engine, EngineState.RELOADING, reason)

    def hold_back(self, engine: Engine) -> None:
        """Hold back the engine's replies: unproven weights may sample for the requests in flight."""
        engine.hold.begin()

    def switch(self, engine: Engine, versions: dict[int, str], since: float) -> bool:
        """Note that the weights were replaced under the requests in flight. Returns whether this was new.

        since: clock.since_boot_s(), while the engine was paused.
        """
        engine.versions, engine.version = versions, max(versions)
        if engine.switches and engine.switches[-1][2] == engine.version:
            return False
        engine.switches.append((clock.since_boot_s(), since, engine.version))
        return True

    @contextmanager
    def admitted(self, engine: Engine) -> Iterator[None]:
        """Send the engine waiting chats, if no other one is open, and hold back their replies until it is open."""
        engine.early_hold.begin()
        engine.early_places = min(self.waiting, max(1, engine.in_flight))
        self._announce()
        try:
            yield
        finally:
            engine.early_places = 0

    def go_on(self, engine: Engine) -> None:
        """Forward the replies that were held back: the weights are proven."""
        engine.hold.release()

    def spoil(self, engine: Engine, reason: str) -> None:
        """End the requests in flight with an error, unrecorded: the weights cannot be trusted."""
        engine.hold.spoil(reason)
        engine.hold = Hold()
        self._end_early(engine, reason)

    def _end_early(self, engine: Engine, wrong: str | None) -> None:
        """Forward the replies to early chats. wrong: why these are sent again instead; their callers got nothing."""
        engine.early_hold.end(wrong)
        engine.early_hold, engine.early_places = Hold(), 0  # the next take-up concerns later chats only

    def check(self, engine: Engine, reason: str) -> None:
        """Close the engine, which answers, until its version is proven."""
        engine.versions, engine.version = {}, None
        self._move(engine, EngineState.CHECKING, reason)

    def withdraw(self, engine: Engine, reason: str) -> None:
        """Close the engine, because it does not answer."""
        engine.versions, engine.version = {}, None
        if engine.hold.is_on:
            self.spoil(engine, reason)
        self._move(engine, EngineState.UNAVAILABLE, reason)

    def _move(self, engine: Engine, state: EngineState, reason: str) -> None:
        if state is EngineState.UNAVAILABLE and engine.state is not state:  # logged once per outage
            log.warning("engine is unavailable", engine=engine.name, reason=reason)
        engine.state, engine.reason = state, reason
        self._end_early(engine, None if state in OPEN else reason)
        self._note(engine)
        self._announce()

    @property
    def _current(self) -> int | None:
        """The version for requests that name none; None: the version of their engine."""
        leading, wanted = {e.version for e in self.serving if self._adapters and e.version is not None}, self._wanted()
        return wanted if wanted in leading else max(leading, default=None)

    def set_versions(self, engine: Engine, versions: dict[int, str]) -> None:
        """Change the engine's set of versions; the one for requests that name none stays."""
        engine.versions = versions
        self._announce()

    def unpin(self, version: int) -> None:
        """Note that engines no longer have to load the version; requests that wait for it end."""
        self.pinned.discard(version)
        self._announce()

    def refuse(self, engine: Engine, version: int, reason: str) -> None:
        """Note why the engine does not load a pinned version."""
        engine.refused[version] = reason
        self._announce()

    async def wait_drained(self, engine: Engine, timeout_s: float) -> bool:
        """Wait until the engine has no requests in flight. Returns False after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while engine.in_flight:
                    await self._changed.wait()
        return not engine.in_flight

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
