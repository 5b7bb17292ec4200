"""Which adapters an engine serves beside the newest version: those that callers have pinned, and no others.

What nobody asks for any more leaves in steps: no new requests here, an announcement, every explorer has acknowledged it
and has no request of that version, unloaded. Only then its lease runs out, and its files may go.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from explorer_service.engines.engine import Engine
from explorer_service.engines.pool import EnginePool
from explorer_service.errors import EngineDied, EngineUnavailable, LoadUndone, NotOwner, ProbeMismatch
from explorer_service.reload.adapter_take_up import AdapterTakeUp
from explorer_service.reload.blame import Backoff, Blame
from explorer_service.reload.health import while_open
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.reloading import Reloading
from shared.errors import EngineError, VersionError
from shared.ledger import queries, transitions
from shared.ledger.queries import VersionRow
from shared.log import StageLogger

log = StageLogger("reload")
_RENEW_S = transitions.VERSION_LEASE_S / 4
_DEADLY = 100  # times `retry_s`: until a pin is tried again that has failed before, and then ended the engine


class AdapterController:
    """For one engine, which this explorer owns."""

    def __init__(
        self, engine: Engine, take_up: AdapterTakeUp, judge: VersionJudge, blame: Blame, shared: Reloading
    ) -> None:
        self._engine = engine
        self._take_up = take_up
        self._judge = judge
        self._blame = blame
        self._shared = shared
        self._pool: EnginePool = shared.pool
        self._most_pins = shared.config.engine.versions_held - 2  # the newest one, and the one that is taken up
        retry_s = shared.config.explorer.reload.retry_s
        self._backoff = Backoff(retry_s)
        self._deadly = Backoff(_DEADLY * retry_s)
        self._left_at: dict[int, int] = {}  # the generation that told the others, by version that leaves
        self._held_at = 0.0  # time.monotonic(): when the leases were last renewed

    async def tend(self) -> None:
        """Bring in what is pinned, give up what is not. Raises EngineError, LedgerError."""
        before = self._take_up.served
        await self._take_up.read_present()
        if lost := [name for name in before.values() if name not in self._take_up.present]:
            self._pool.check(self._engine, f"it does not have {', '.join(lost)} any more: it has started anew")
            return
        if reason := await self._adopt():
            self._pool.check(self._engine, f"what it serves is not proven here: {reason}")
            return
        pins = await self._read_pins(self._engine.version)
        await self.bring_in_pins(pins)
        leaves = await self._give_up({self._engine.version, *pins})
        if leaves or self._engine.versions != self._take_up.names(0):  # it has got back what it had lost
            await self._announce()
        await self._unload()
        if time.monotonic() > self._held_at + _RENEW_S:
            await self._shared.writer.write(self._take_up.note)
            self._held_at = time.monotonic()

    async def _adopt(self) -> str | None:
        """Prove the version that the owner before this one had the engine serve, so that it is not given up.

        None when the engine has proven it, else why not.
        """
        version = self._engine.version
        if not version or version in self._take_up.served:
            return None
        return await self._bring_in(version)

    async def bring_in_pins(self, pins: Collection[int] | None = None) -> None:
        """Load what is pinned, one after the other. An engine that is not open yet is announced by whoever opens it."""
        for version in await self._read_pins(None) if pins is None else pins:
            if version in self._take_up.served or self._has_to_wait(version):
                continue
            if self._take_up.room < 2 and not self._take_up.inherited(version):
                return  # one place is for the newest version; who asked waits until another has left
            if reason := await self._bring_in(version):
                log.warning("pinned version not taken up", version=version, engine=self._engine.name, reason=reason)
                self._refuse(version, reason)
            else:
                self._shared.metrics.pins.labels("served").inc()
                self._engine.refused.pop(version, None)
                if self._engine.is_open:
                    await self._announce()
                log.info("pinned version in service", version=version, engine=self._engine.name)

    def _has_to_wait(self, version: int) -> bool:
        """One that has failed is tried again after a time, and only where the engine serves the rest already."""
        if version in self._engine.refused and not self._engine.is_open:
            return True
        return self._backoff.wait_s(version) > 0.0 or self._deadly.wait_s(version) > 0.0

    def _refuse(self, version: int, reason: str, *, died: bool = False) -> None:
        """Callers who wait for the version are told why they do not get it."""
        self._shared.metrics.pins.labels("failed").inc()
        backoff = self._deadly if died and version in self._engine.refused else self._backoff
        backoff.note(version, reason)
        self._pool.refuse(self._engine, version, reason)

    async def _bring_in(self, version: int) -> str | None:
        """None when the engine has proven the version, else why it does not serve it."""
        row = (await self._shared.fetch(lambda c: queries.find_versions(c, [version]))).get(version)
        if row is None or not row.may_be_pinned:
            return "it is not on disk any more"
        try:
            try:
                target = await self._judge.examine(row)
            except EngineError as error:  # of root_dir, and not of the engine
                return str(error)
            if target is None:
                return "its files are not there yet"
            return await self._load(target)
        except VersionError as error:
            await self._blame.reject(row, error)
            return str(error)

    async def _load(self, target: TargetVersion) -> str | None:
        """As `_bring_in`. Raises VersionError, EngineUnavailable."""
        try:
            async with while_open(self._engine):
                target = await self._take_up.stage(target)
            await self._take_up.run(target, None)
        except (LoadUndone, ProbeMismatch) as error:
            is_technical = isinstance(error, LoadUndone) and error.is_technical
            await (self._blame.count if is_technical else self._blame.condemn)(target, str(error))
            return str(error)
        except EngineDied as error:
            self._refuse(target.version, str(error), died=True)
            await self._blame.count(target, str(error))
            raise
        except (EngineUnavailable, NotOwner):
            raise
        except EngineError as error:
            return str(error)
        return None

    async def _give_up(self, wanted: Collection[int | None]) -> bool:
        """Send no more requests for anything else. Returns whether the others have to be told."""
        unwanted = {v: name for v, name in self._take_up.served.items() if v not in wanted}
        for version, name in {**unwanted, **await self._find_strays()}.items():
            self._take_up.leave(version, name)
        self._left_at = {v: since for v, since in self._left_at.items() if v in self._take_up.leaving}
        return bool(self._take_up.leaving.keys() - self._left_at.keys())

    async def _find_strays(self) -> dict[int, str]:
        """Adapters of this ledger that an owner before this one has loaded, and nobody wants."""
        known = {*self._take_up.served.values(), *self._take_up.leaving.values()}
        unknown = [name for name in self._take_up.present if name not in known]
        strays = {version: name for name in unknown if (version := self._shared.version_named(name)) is not None}
        if not strays:
            return {}
        rows: dict[int, VersionRow] = await self._shared.fetch(lambda c: queries.find_versions(c, list(strays)))
        named = {v: strays[v] for v, r in rows.items() if self._shared.adapter_name(v, r.manifest_sha256) == strays[v]}
        return {version: name for version, name in named.items() if self._take_up.is_own(version, name)}

    async def _announce(self) -> None:
        """What the engine serves has changed: this explorer first, then all others."""
        engine = self._engine
        self._pool.set_versions(engine, self._take_up.names(0))
        leaving = set(self._take_up.leaving)
        generation = await self._shared.leases.announce(
            engine.url, engine.state, engine.version, also=self._take_up.note
        )
        self._left_at = dict.fromkeys(leaving, generation) | self._left_at
        self._held_at = time.monotonic()

    async def _unload(self) -> None:
        """What no explorer sends requests for, and none has any of."""
        quiet = {v: since for v, since in self._left_at.items() if not self._engine.in_flight_of.get(v)}
        if not quiet:
            return
        followed = await self._shared.leases.read_followed(self._engine.url)
        for version, since in quiet.items():
            if all(other.generation >= since and version not in other.ending for other in followed):
                await self._shared.leases.require(self._engine.url)
                await self._take_up.unload(version)
                del self._left_at[version]
                self._shared.poller.wake()  # there may be pins that waited for its place

    async def _read_pins(self, current: int | None) -> list[int]:
        """The pinned versions that the engine has room for, those that were used last."""
        pins = [version for version in await self._shared.fetch(queries.pinned_versions) if version not in (0, current)]
        ending = sum(version in self._engine.in_flight_of for version in self._take_up.leaving)
        return pins[: max(0, self._most_pins - ending)]
