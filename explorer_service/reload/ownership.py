"""Several explorers agree on a reload: one of them owns each engine and moves it; the others follow, and say so.

Owns this explorer's leases on engines. The owner announces each move as a row with a generation; every other explorer
that has the engine acknowledges that generation once it gives the engine no more chats.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn

from sqlalchemy import Connection

from explorer_service.errors import NotOwner
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from shared.clock import SHORT_SLEEP_S, asleep_s
from shared.config import EngineAddress, is_loopback
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import EngineRow, Followed
from shared.log import StageLogger
from shared.process import machine_name

log = StageLogger("reload")
POLL_S = 0.05  # how often an acknowledgement, or the end of another explorer's reload, is asked for


class _Told(NamedTuple):
    """What this explorer has last announced of an engine."""

    state: str
    version: int | None
    generation: int


class EngineLeases:
    """Which engines this explorer owns, and what state the others' engines are in.

    An engine is known to all by its URL, and by its machine where the URL means another one on each machine.
    """

    def __init__(
        self, ledger: Ledger, writer: LedgerWriter, membership: Membership, engines: Iterable[EngineAddress]
    ) -> None:
        self._ledger = ledger
        self._writer = writer
        self._membership = membership
        self._acquired_at: dict[str, float] = {}  # time.monotonic(); by engine url
        self._told: dict[str, _Told] = {}  # by engine url; none while it is not known whether it was stored
        self._asleep_s = asleep_s()  # as of the last look
        self._woke_at = -math.inf  # time.monotonic(): when it was noticed that this machine had been suspended
        self._spoiled: set[str] = set()  # urls
        self._switched_at: dict[str, float] = {}  # time.monotonic(); by engine url
        self._keys = {engine.url: engine_key(engine) for engine in engines}
        membership.acknowledged.update(dict.fromkeys(self._keys.values(), Followed()))

    @property
    def explorer(self) -> str:
        """This explorer's name in the ledger."""
        return self._membership.id

    def key(self, url: str) -> str:
        """The engine's name in the ledger."""
        return self._keys[url]

    async def acquire(self, url: str) -> bool:
        """Whether this explorer owns the engine: it does already, or nobody else does. Raises LedgerError."""
        if self.holds(url):
            return True
        asked_at, key = time.monotonic(), self.key(url)
        owned = await self._writer.write(lambda c: transitions.acquire_engine(c, key, self._membership.id))
        if owned:
            self._acquired_at[url] = asked_at
        else:
            self.forget(url)
        return owned

    def holds(self, url: str) -> bool:
        """Whether this explorer owns the engine, as far as it knows without asking the ledger."""
        acquired_at, heartbeat_at = self._acquired_at.get(url), self._membership.heartbeat_at
        if acquired_at is None:
            return False
        if heartbeat_at > acquired_at and self.key(url) not in self._membership.owned:
            return False  # the lease ran out while this explorer stood still, and another one has the engine
        renewed_at = max(acquired_at, heartbeat_at)  # every heartbeat renews all leases that are left
        if (asleep := asleep_s()) > self._asleep_s + SHORT_SLEEP_S:  # the database's clock went on meanwhile
            self._asleep_s, self._woke_at = asleep, time.monotonic()
        return self._woke_at < renewed_at and time.monotonic() < renewed_at + transitions.ENGINE_LEASE_S * 2 / 3

    def believes_to_own(self, url: str) -> bool:
        """Whether this explorer owned the engine when it last asked, however long ago."""
        return url in self._acquired_at

    def forget(self, url: str) -> None:
        """Ask the ledger next time."""
        self._acquired_at.pop(url, None)
        self._spoiled.discard(url)
        self._switched_at.pop(url, None)  # another owner may have replaced them again

    def note_spoiled(self, url: str) -> None:
        """What was in flight was sampled by weights that failed their proof: the next announcement says so."""
        self._spoiled.add(url)

    def note_switch(self, url: str, switched_at: float) -> None:
        """The engine's weights were replaced then, time.monotonic(): every announcement says so."""
        self._switched_at[url] = switched_at

    async def announce(
        self, url: str, state: str, version: int | None, *, also: Callable[[Connection], object] | None = None
    ) -> int:
        """Tell the others the state of an engine. Returns the move's generation.

        also: what becomes true with it, in the same transaction. Raises NotOwner, LedgerError.
        """
        key, own, spoiled = self.key(url), self._membership.id, url in self._spoiled
        self._told.pop(url, None)
        switched_at = self._switched_at.get(url)

        def write(connection: Connection) -> int | None:
            ago_s = None if switched_at is None else time.monotonic() - switched_at
            moved = transitions.set_engine_state(
                connection, key, own, state, version, spoiled=spoiled, switched_ago_s=ago_s
            )
            if moved is not None and also is not None:
                also(connection)
            return moved

        generation = await self._writer.write(write)
        if generation is None:
            self._lose(url)
        self._spoiled.discard(url)
        self._told[url] = _Told(state, version, generation)
        return generation

    def has_told(self, url: str, state: str, version: int | None) -> bool:
        """Whether that is what this explorer has last announced of the engine."""
        return (told := self._told.get(url)) is not None and told[:2] == (state, version)

    def known_generation(self, url: str) -> int:
        """The last move of the engine that this explorer has made or followed."""
        told = self._told.get(url)
        return max(-1 if told is None else told.generation, self._membership.acknowledged[self.key(url)].generation)

    async def confirm(
        self, url: str, generation: int, also: Callable[[Connection], bool] = lambda _connection: True
    ) -> bool:
        """Raise NotOwner unless the engine is still ours, as of that generation: the last moment to turn back.

        also: what has to be so at the same moment. Returns whether it is. Renews the lease.
        """
        key, own, asked_at = self.key(url), self._membership.id, time.monotonic()

        def write(connection: Connection) -> bool | None:
            return also(connection) if transitions.confirm_engine(connection, key, own, generation) else None

        confirmed = await self._writer.write(write)
        if confirmed is None:
            self._lose(url)
        self._acquired_at[url] = asked_at
        return confirmed

    async def require_held(self, url: str, generation: int | None = None) -> None:
        """Raise NotOwner unless the engine is still ours: this explorer may have stood still since it last looked.

        generation: of our last move, so that nobody has moved the engine since. The ledger is asked only when so much
        time has passed that another explorer may have the engine. Raises LedgerError.
        """
        if self.holds(url):
            return
        if generation is None:
            await self.require(url)
        else:
            await self.confirm(url, generation)

    async def require(self, url: str) -> None:
        """Raise NotOwner unless the engine is still ours; renews the lease."""
        key, own = self.key(url), self._membership.id
        if not await self._writer.write(lambda c: transitions.acquire_engine(c, key, own)):
            self._lose(url)

    async def read_followed(self, url: str) -> list[Followed]:
        """How far the other living explorers that have this engine have followed it. Raises LedgerError."""
        key, living = self.key(url), await asyncio.to_thread(self._ledger.fetch, queries.live_explorers)
        return [found[key] for explorer, found in living.items() if explorer != self._membership.id and key in found]

    async def wait_followed(self, url: str, generation: int, timeout_s: float) -> int:
        """Until every other living explorer that has this engine gives it no more chats.

        Returns how many requests with a seed they have there. After `timeout_s` it goes on without the rest.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            others = await self.read_followed(url)
            if all(followed.generation >= generation for followed in others):
                return sum(followed.seeded for followed in others)
            if time.monotonic() > deadline:
                log.warning("an explorer did not follow in time", engine=self.key(url), generation=generation)
                return sum(followed.seeded for followed in others)
            await asyncio.sleep(POLL_S)

    async def read(self, url: str) -> EngineRow | None:
        """What the owner of an engine says of it. Raises LedgerError."""
        key = self.key(url)
        return await asyncio.to_thread(self._ledger.fetch, lambda connection: queries.read_engine(connection, key))

    async def acknowledge(self, url: str, generation: int, seeded: int, ending: Iterable[int]) -> None:
        """This explorer has followed the engine to that generation. Raises LedgerError.

        seeded: its requests with a seed there; ending: versions that it sends no requests for any more and still has
        some of. The owner hears of a new generation, and of the end of the last request, at once.
        """
        acknowledged, key = self._membership.acknowledged, self.key(url)
        before, now = acknowledged[key], Followed(generation, seeded, sorted(ending))
        if before.generation < generation or before.ending != now.ending:
            acknowledged[key] = now
            await self._membership.heartbeat()

    def _lose(self, url: str) -> NoReturn:
        self.forget(url)
        raise NotOwner("another explorer owns this engine now")


def engine_key(engine: EngineAddress) -> str:
    """The engine's name among all that share a ledger: a loopback URL of another machine is another engine."""
    return f"{machine_name()} {engine.url}" if is_loopback(engine.host) else engine.url
