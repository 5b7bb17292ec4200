"""The follower's side of a take-up: another explorer owns the engine, and this one follows the engine's row."""

from __future__ import annotations

import asyncio

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.reload.probe import read_defaults_before, read_sampling_defaults
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import LOADING
from shared import clock
from shared.errors import VersionMissing
from shared.experience import Sampling
from shared.ledger import queries
from shared.ledger.queries import EngineRow, VersionRow
from shared.log import StageLogger
from shared.versions import version_path

log = StageLogger("reload")


def _otherwise(version: int, label: str) -> str:
    """Return why an engine that reports this label is not used."""
    return (
        f"its owner serves version {version}, but it holds {label!a}; either it was restarted just now, or its url "
        "names another engine on the owner's host: give each engine a url that names it on all hosts"
    )


class EngineFollower:
    """Follows one engine through the moves that its owner announces."""

    def __init__(self, engine: Engine, admin: EngineAdmin, reloading: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._reloading = reloading
        self._pool = reloading.pool
        self._settings = reloading.config.explorer.reload
        self.owner_reloads = False  # according to the last read
        self._missing: int | None = None  # the last version whose folder was missing

    async def follow(self) -> None:
        """Apply the engine's row, and acknowledge it. Raises EngineUnavailable, LedgerError, VersionError."""
        engine = self._engine
        engine.refused.clear()  # only its owner knows which versions it does not load
        if (reason := self._reloading.leases.owned_otherwise(engine.url)) is not None:
            self._stand_back(reason)
            return
        known_until = self._pool.known_until
        row = await self._reloading.leases.read(engine.url)
        self.owner_reloads = row is not None and row.state == EngineState.RELOADING
        if row is None:
            return
        if row.spoiled > self._reloading.leases.known_generation(engine.url):
            self._pool.spoil(engine, "its owner found wrong weights in it")
        if row.state in (EngineState.SERVING, EngineState.DEGRADED) and row.version is not None:
            names = await self._read_names(row.version)
            if row.version not in names:  # the engine was moved meanwhile
                return
            if (other := await self._read_other_label(row.version)) is None:
                if not await self._serve(row, row.version, names, known_until):
                    return
            elif await self._is_unmoved(row):
                self._stand_back(_otherwise(row.version, other))
            else:
                return
        elif row.state == EngineState.RELOADING:
            await self._hold_back()
        elif engine.state is not EngineState.CHECKING:
            self._pool.check(engine, "its owner checks it")
        if row.state == EngineState.UNAVAILABLE:
            await self._admin.check_health()  # only then acknowledged: its owner leaves it to who reaches it
        ending = [version for version in engine.in_flight_of if version not in engine.versions]
        await self._reloading.leases.acknowledge(engine.url, row.generation, engine.seeded_in_flight, ending)

    async def follow_unreached(self) -> None:
        """Acknowledge the row of an engine that does not answer this explorer, if that has no requests to label there.

        Otherwise a reload or the unloading of an adapter would wait for it. An engine that this explorer acquired, but
        could not inherit, is released. Raises LedgerError.
        """
        engine, leases = self._engine, self._reloading.leases
        await leases.release_own_name(engine.url)  # this explorer may reach the engine by another of its urls
        row = await leases.read(engine.url)
        if row is not None and row.owner == leases.explorer:
            self.owner_reloads = False  # so it is acquired again only once it answers
            await leases.release(engine.url)
            return
        if row is None or row.state == EngineState.UNAVAILABLE:
            return
        if not engine.in_flight or self._reloading.loads_adapters:  # a request to an adapter is of one version
            ending = list(engine.in_flight_of)
            await leases.acknowledge(engine.url, row.generation, engine.seeded_in_flight, ending)

    async def _read_other_label(self, version: int) -> str | None:
        """Return the label of an engine that is about to serve a version, if it is another one's; None if it is not.

        The url may be another engine at its owner. Version 0 has any label: it may be what the engine was started with.
        """
        engine = self._engine
        if version == 0 or self._reloading.loads_adapters or (engine.is_open and engine.version == version):
            return None
        label = await self._admin.read_label()
        return None if label is None or label.startswith(f"{version}:") else label

    async def _is_unmoved(self, row: EngineRow) -> bool:
        again = await self._reloading.leases.read(self._engine.url)
        return again is not None and again.generation == row.generation

    def _stand_back(self, reason: str) -> None:
        """Close an engine whose weights are unknown: an explorer with another url owns it, or it is not the owner's."""
        engine = self._engine
        self.owner_reloads = False  # so its health is checked, and the ownership tried again
        if engine.is_open or engine.hold.is_on:
            self._pool.spoil(engine, reason)
        if engine.reason != reason:
            log.error("engine is not used", engine=engine.name, reason=reason)
            self._pool.check(engine, reason)

    async def _read_names(self, version: int) -> dict[int, str]:
        """Return what the engine serves, with the names. version: for requests that name none."""
        reloading = self._reloading
        if not reloading.loads_adapters:
            return reloading.named(version)
        key = reloading.leases.key(self._engine.url)
        adapters = await reloading.fetch(lambda connection: queries.served_adapters(connection, key))
        return {
            **reloading.named(0),
            **{number: reloading.adapter_name(number, sha) for number, sha in adapters.items()},
        }

    async def _read_defaults(self, version: int) -> Sampling | None:
        """Return the engine's sampling defaults; None: the version's folder is not there yet."""
        try:
            return await asyncio.to_thread(read_sampling_defaults, self._reloading.config.root / version_path(version))
        except VersionMissing as error:
            if not await self._reloading.fetch(queries.any_published):
                return await asyncio.to_thread(read_defaults_before, self._reloading.config.model.path)
            if self._missing != version:
                log.warning("an engine gets no chats until its version's folder appears", reason=str(error))
            self._missing = version
            return None

    async def _serve(self, row: EngineRow, version: int, names: dict[int, str], known_until: float) -> bool:
        """Open the engine with the row's version. Returns False if its owner may have moved it since the row was read.

        known_until: clock.since_boot_s(); until then, the owner waits for this explorer's acknowledgement.
        """
        engine, state = self._engine, EngineState(row.state)
        if engine.state is state and engine.version == version and engine.versions == names:
            return True
        adapters = self._reloading.loads_adapters  # then a request is computed by one version
        if engine.version != version and not adapters:  # requests may cross the change of versions
            self._pool.switch(engine, names, row.switched_at)
        defaults = await self._read_defaults(0 if adapters else version)
        if clock.since_boot_s() >= known_until and not await self._is_unmoved(row):
            return False
        if defaults is None:
            self._pool.check(engine, f"the folder of version {version} is not there")
            return True
        degraded = "its owner reports it as degraded" if state is EngineState.DEGRADED else ""
        self._pool.serve(engine, names, defaults, degraded, version)
        return True

    async def _hold_back(self) -> None:
        """Send no new chats and forward no replies: the engine's next token may be of another version."""
        engine = self._engine
        if engine.is_open:
            self._pool.close(engine, "another explorer reloads it")
            if self._settings.streams == "finish":
                await self._pool.wait_drained(engine, self._settings.drain_s)
        if not engine.hold.is_on:
            self._pool.hold_back(engine)

    async def inherit(self, wanted: VersionRow | None) -> None:
        """Take the engine over from the previous owner, and spoil requests in flight if an unproven version may answer.

        They continue if the engine was resumed only with weights that it should hold or has proven. Raises EngineError,
        LedgerError, VersionError.
        """
        if self._engine.is_open:
            await self.follow()  # the previous owner's last move
        row = await self._reloading.leases.read(self._engine.url)
        if row is None or row.state != EngineState.RELOADING:
            return
        label = await self._admin.read_label(may_load=True) or ""
        known = [row.version] if wanted is None else [row.version, wanted.version]
        if not label.startswith((LOADING, *(f"{version}:" for version in known))):
            self._pool.spoil(self._engine, "an explorer died while it reloaded the engine")
            self._reloading.leases.note_spoiled(self._engine.url)
