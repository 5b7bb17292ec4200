"""Several explorers on one ledger behave as one: one of them keeps each engine, all of them know where it stands.

Owns this explorer's heartbeat and leases. Alone on a ledger it costs one small write every two seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from explorer_service.record import Recorder
from shared.errors import LedgerError
from shared.ledger import fleet
from shared.ledger.connect import Ledger
from shared.ledger.fleet import EngineRow
from shared.lifecycle import process_name, until_next
from shared.log import StageLogger

log = StageLogger("fleet")

BEAT_S = 2.0
LOOK_S = 0.05  # how often something is asked for that is about to change


class Fleet:
    """This explorer among the others. `run()` ends only by cancellation."""

    def __init__(self, ledger: Ledger, recorder: Recorder) -> None:
        self.id = process_name()
        self.alone = True  # as far as the last look showed
        self._ledger = ledger
        self._recorder = recorder
        self._acknowledged: dict[str, int] = {}
        self._kept_until: dict[str, float] = {}  # time.monotonic(); by engine url

    async def run(self) -> None:
        """Heartbeats."""
        while True:
            try:
                await self.beat()
            except LedgerError as error:
                log.debug("no heartbeat: the ledger is away", reason=str(error))
            await asyncio.sleep(until_next(BEAT_S))

    async def beat(self) -> None:
        """Say that this explorer lives, and see who else does."""
        sent_at = time.monotonic()
        acknowledged = dict(self._acknowledged)

        living = await self._recorder.write(lambda connection: fleet.beat(connection, self.id, acknowledged))
        self.alone = living < 2
        for url in self._kept_until:
            self._kept_until[url] = sent_at + fleet.LEASE_S

    async def leave(self) -> None:
        """Free what this explorer keeps."""
        try:
            await self._recorder.write(lambda connection: fleet.leave(connection, self.id))
        except LedgerError as error:
            log.warning("not signed off; the others notice by themselves", reason=str(error))

    async def keeps(self, url: str) -> bool:
        """Whether this explorer keeps the engine: it does, or takes it when nobody else does."""
        if self._kept_until.get(url, 0.0) > time.monotonic() + fleet.LEASE_S / 3:
            return True
        asked_at = time.monotonic()
        kept = await self._recorder.write(lambda connection: fleet.keep_engine(connection, url, self.id))
        if kept:
            self._kept_until[url] = asked_at + fleet.LEASE_S
        else:
            self._kept_until.pop(url, None)
        return kept

    async def move(self, url: str, state: str, version: int | None) -> int | None:
        """Tell the others where the engine stands. Returns the generation; None: it is no longer ours to move."""
        generation = await self._recorder.write(
            lambda connection: fleet.move_engine(connection, url, self.id, state, version)
        )
        if generation is None:
            self._kept_until.pop(url, None)
        return generation

    async def wait_followed(self, url: str, generation: int, timeout_s: float) -> bool:
        """Until every other living explorer gives the engine no more chats; False when `timeout_s` ran out first."""
        deadline = time.monotonic() + timeout_s
        while True:
            others = await asyncio.to_thread(self._others)
            if all(acknowledged.get(url, -1) >= generation for acknowledged in others.values()):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)

    def _others(self) -> dict[str, dict[str, int]]:
        with self._ledger.read() as connection:
            living = fleet.live_explorers(connection)
        living.pop(self.id, None)
        return living

    async def look(self, url: str) -> EngineRow | None:
        """What the keeper of an engine says of it."""

        def read() -> EngineRow | None:
            with self._ledger.read() as connection:
                return fleet.read_engine(connection, url)

        return await asyncio.to_thread(read)

    async def acknowledge(self, url: str, generation: int) -> None:
        """This explorer has followed the engine to that generation."""
        if self._acknowledged.get(url, -1) < generation:
            self._acknowledged[url] = generation
            await self.beat()

    @asynccontextmanager
    async def streaming(self, msg_id: str) -> AsyncIterator[None]:
        """Around a stream, whose id its caller knows before its row stands: the others must know that it will come."""
        if self.alone:
            yield
            return
        await self._recorder.write(lambda connection: fleet.open_stream(connection, msg_id, self.id))
        try:
            yield
        finally:
            await self._recorder.write(lambda connection: fleet.close_stream(connection, msg_id))

    async def wait_recorded(self, msg_ids: list[str]) -> None:
        """Until no other explorer streams one of these."""
        if self.alone:
            return
        names = [name.partition("#")[0] for name in msg_ids]

        def any_open() -> bool:
            with self._ledger.read() as connection:
                return fleet.any_stream_open(connection, names)

        while await asyncio.to_thread(any_open):  # noqa: ASYNC110 — it ends in another process
            await asyncio.sleep(LOOK_S)
