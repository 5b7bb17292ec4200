"""Coordinate several explorers: one of them owns each engine and moves it; the others follow and acknowledge.

Owns this explorer's leases on engines. The owner announces each move in the engine's row, with a generation; every
other explorer that uses the engine acknowledges the generation once it sends the engine no more chats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from sqlalchemy import Connection

from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import NotOwner
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from explorer_service.reload.names import OwnNames, engine_key, own_name
from shared import clock
from shared.config import EngineAddress
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import EngineRow, Followed
from shared.log import StageLogger

log = StageLogger("reload")
POLL_S = 0.05  # between queries for acknowledgements, or for the end of another explorer's reload


class _Announced(NamedTuple):
    """This explorer's last announcement of an engine."""

    state: str
    version: int | None
    generation: int


@dataclass(slots=True)
class _Lease:
    """What this explorer knows of its ownership of one engine."""

    key: str  # the engine's name in the ledger
    acquired_at: float | None = None  # clock.since_boot_s(); None: another explorer may own the engine
    announced: _Announced | None = None  # None while it may or may not be stored
    spoiled: bool = False  # to be stated in the next announcement
    switched_at: float | None = None  # clock.since_boot_s()
    owned_otherwise: str | None = None  # who owns it by another url, in words


class EngineLeases:
    """The engines that this explorer owns, and the announced states of all engines.

    An engine is identified by its URL, and by its machine if the URL is a loopback one. An owner also owns the engine's
    own name, if it has one: explorers that name it by different URLs know nothing of each other's moves.
    """

    def __init__(
        self, ledger: Ledger, writer: LedgerWriter, membership: Membership, engines: Iterable[EngineAddress]
    ) -> None:
        self._ledger = ledger
        self._writer = writer
        self._membership = membership
        engines = list(engines)
        self._leases = {engine.url: _Lease(engine_key(engine)) for engine in engines}
        self._own_names = OwnNames(engines)  # second names in the ledger
        membership.acknowledged.update({lease.key: Followed() for lease in self._leases.values()})

    @property
    def explorer(self) -> str:
        """This explorer's name in the ledger."""
        return self._membership.id

    def key(self, url: str) -> str:
        """The engine's name in the ledger."""
        return self._leases[url].key

    async def identify(self, url: str, identity: str | None) -> None:
        """Note the own name of an engine that does not serve yet; None: it has none. Raises LedgerError."""
        name = own_name(identity)
        if name == self._own_names.get(url):
            return
        await self.release_own_name(url)  # another engine has this url now
        self._own_names.note(url, name)
        self._leases[url].acquired_at = None

    def owned_otherwise(self, url: str) -> str | None:
        """Return who owns the engine by another url, in words; None: nobody, according to the last `acquire`."""
        return self._leases[url].owned_otherwise

    async def acquire(self, url: str) -> bool:
        """Acquire the engine unless another explorer owns it. Returns whether this one does. Raises LedgerError."""
        if self.holds(url):
            return True
        lease, asked_at, own = self._leases[url], clock.since_boot_s(), self._membership.id
        key = lease.key

        def acquire(connection: Connection) -> Literal[True] | str:
            """Returns whether it is acquired, or else who owns it by another url; empty: its owner has the same url."""
            if not self._own_names.acquire(connection, url, own):
                transitions.release_engine(connection, key, own)
                return self._own_names.owner(connection, url, key)
            if transitions.acquire_engine(connection, key, own):
                return True
            transitions.release_engine(connection, self._own_names.leased(url) or key, own)
            return ""

        acquired = await self._writer.write(acquire)
        if acquired is True:
            lease.acquired_at, lease.owned_otherwise = asked_at, None
            return True
        self.forget(url)
        lease.owned_otherwise = acquired or None
        return False

    def holds(self, url: str) -> bool:
        """Whether this explorer certainly owns the engine. Makes no query."""
        acquired_at, heartbeat_at = self._leases[url].acquired_at, self._membership.heartbeat_at
        if acquired_at is None:
            return False
        if heartbeat_at > acquired_at and not self._names(url) <= self._membership.owned:
            return False  # the lease expired while this explorer was suspended, and another one owns the engine
        renewed_at = max(acquired_at, heartbeat_at)  # every heartbeat renews all leases that remain
        return clock.since_boot_s() < renewed_at + transitions.ENGINE_LEASE_S * 2 / 3

    def believes_to_own(self, url: str) -> bool:
        """Whether this explorer owned the engine at its last query, however long ago."""
        return self._leases[url].acquired_at is not None

    def forget(self, url: str) -> None:
        """Query the ledger the next time."""
        lease = self._leases[url]
        lease.acquired_at, lease.spoiled = None, False
        lease.switched_at = None  # another owner may have replaced the weights again

    def note_spoiled(self, url: str) -> None:
        """State in the next announcement that weights that failed their proof sampled requests in flight."""
        self._leases[url].spoiled = True

    def note_switch(self, url: str, switched_at: float) -> None:
        """State in all announcements when the engine's weights were replaced. switched_at: clock.since_boot_s()."""
        self._leases[url].switched_at = switched_at

    async def announce(
        self, url: str, state: str, version: int | None, *, also: Callable[[Connection], object] | None = None
    ) -> int:
        """Announce the state of an engine. Returns the move's generation.

        also: further writes in the same transaction. Raises NotOwner, LedgerError.
        """
        lease, own = self._leases[url], self._membership.id
        key, spoiled, switched_at = lease.key, lease.spoiled, lease.switched_at
        lease.announced = None

        def write(connection: Connection) -> int | None:
            moved = transitions.set_engine_state(
                connection, key, own, state, version, spoiled=spoiled, switched_at=switched_at
            )
            if moved is not None and also is not None:
                also(connection)
            return moved

        generation = await self._writer.write(write)
        if generation is None:
            self._lose(url)
        lease.spoiled = False
        lease.announced = _Announced(state, version, generation)
        return generation

    async def report_away(self, engine: Engine) -> bool:
        """Announce once that the engine does not answer. Returns whether this explorer still owns it.

        If another explorer has followed that announcement, it reaches the engine: this one releases it. An explorer
        with another url for it follows no announcement, so the own name is released as soon as no request is in flight
        there. Raises NotOwner, LedgerError.
        """
        url = engine.url
        if not await self.acquire(url):
            return False
        announced = self._leases[url].announced
        if announced is None or not self.has_told(url, EngineState.UNAVAILABLE, None):
            await self.announce(url, EngineState.UNAVAILABLE, None)
            return True
        if all(other.generation < announced.generation for other in await self.read_followed(url)):
            if not engine.in_flight:
                await self.release_own_name(url)
            return True
        await self.release(url)
        log.warning("another explorer reaches the engine; this one gives it up", engine=self.key(url))
        return False

    async def release(self, url: str) -> None:
        """Let another explorer own the engine. Raises LedgerError."""
        names, own = sorted(self._names(url)), self._membership.id
        self._leases[url].announced = None
        self.forget(url)

        def release(connection: Connection) -> None:
            for name in names:
                transitions.release_engine(connection, name, own)

        await self._writer.write(release)

    async def release_own_name(self, url: str) -> None:
        """Forget the engine's own name, until it is read again, and give its lease up. Raises LedgerError."""
        name, own = self._own_names.leased(url), self._membership.id
        if name:
            await self._writer.write(lambda connection: transitions.release_engine(connection, name, own))
        self._own_names.forget(url)

    def _names(self, url: str) -> set[str]:
        """Return the engine's names in the ledger that belong to its lease."""
        return {self.key(url), self._own_names.leased(url) or self.key(url)}

    def has_told(self, url: str, state: str, version: int | None) -> bool:
        """Whether this explorer's last announcement of the engine is this one."""
        return (announced := self._leases[url].announced) is not None and announced[:2] == (state, version)

    def known_generation(self, url: str) -> int:
        """Return the generation of the engine's last move that this explorer has made or followed."""
        own = -1 if (announced := self._leases[url].announced) is None else announced.generation
        return max(own, self._membership.acknowledged[self.key(url)].generation)

    async def confirm(
        self, url: str, generation: int, also: Callable[[Connection], bool] = lambda _connection: True
    ) -> bool:
        """Raise NotOwner unless this explorer owns the engine, unmoved since that generation. Renews the lease.

        also: a condition to check in the same transaction. Returns whether it is true.
        """
        key, own, asked_at = self.key(url), self._membership.id, clock.since_boot_s()

        def write(connection: Connection) -> bool | None:
            owned = self._own_names.acquire(connection, url, own)
            return also(connection) if owned and transitions.confirm_engine(connection, key, own, generation) else None

        confirmed = await self._writer.write(write)
        if confirmed is None:
            self._lose(url)
        self._leases[url].acquired_at = asked_at
        return confirmed

    async def require_held(self, url: str, generation: int | None = None) -> None:
        """Raise NotOwner unless this explorer still owns the engine: it may have been suspended meanwhile.

        generation: of this explorer's last move; nobody may have moved the engine since. Queries the ledger only after
        so much time that another explorer may own the engine. Raises LedgerError.
        """
        if generation is None:
            if not await self.acquire(url):
                self._lose(url)
        elif not self.holds(url):
            await self.confirm(url, generation)

    async def read_followed(self, url: str) -> list[Followed]:
        """Return how far each other live explorer with this engine has followed it. Raises LedgerError."""
        key, living = self.key(url), await asyncio.to_thread(self._ledger.fetch, queries.live_explorers)
        return [found[key] for explorer, found in living.items() if explorer != self._membership.id and key in found]

    async def wait_followed(self, url: str, generation: int, timeout_s: float) -> int:
        """Wait until every other live explorer with this engine sends it no more chats, at most `timeout_s`.

        Returns the number of requests with a seed that they have there.
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
        """Read the row in which its owner announces an engine. Raises LedgerError."""
        key = self.key(url)
        return await asyncio.to_thread(self._ledger.fetch, lambda connection: queries.read_engine(connection, key))

    async def acknowledge(self, url: str, generation: int, seeded: int, ending: Iterable[int]) -> None:
        """Acknowledge that this explorer has followed the engine to that generation. Raises LedgerError.

        seeded: its requests with a seed there; ending: versions for which it sends no more requests, but still has
        some. A new generation, and a change of `ending`, are sent at once.
        """
        acknowledged, key = self._membership.acknowledged, self.key(url)
        before, now = acknowledged[key], Followed(generation, seeded, sorted(ending))
        if before.generation < generation or before.ending != now.ending:
            acknowledged[key] = now
            await self._membership.heartbeat()

    def _lose(self, url: str) -> NoReturn:
        self.forget(url)
        raise NotOwner("another explorer owns this engine now")
