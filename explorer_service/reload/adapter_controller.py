"""Load and unload adapters besides the leading version: those that have a share of the chats, or that callers pinned.

An adapter that is no longer pinned leaves in steps: this explorer sends it no new requests, announces that, waits until
all explorers have acknowledged it and have no requests for it, and unloads it. Only then its lease ends, and its files
may be deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from explorer_service.engines.engine import Engine, EngineState
from explorer_service.engines.pool import EnginePool
from explorer_service.errors import EngineDied, EngineUnavailable, LoadUndone, NoRoom, NotOwner, ProbeMismatch
from explorer_service.reload.adapter_take_up import AdapterTakeUp
from explorer_service.reload.blame import Backoff, Blame
from explorer_service.reload.health import while_open
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.reloading import Reloading
from shared.clock import until_next_tick
from shared.errors import EngineError, LedgerError, VersionError
from shared.ledger import queries, transitions
from shared.ledger.queries import VersionRow
from shared.log import StageLogger

log = StageLogger("reload")
_RENEW_S = transitions.VERSION_LEASE_S / 4
_DEADLY = 100  # multiple of `retry_s` before a pin is retried that failed before, and then ended the engine


class AdapterController:
    """The adapters of one engine that this explorer owns."""

    def __init__(
        self,
        engine: Engine,
        take_up: AdapterTakeUp,
        judge: VersionJudge,
        blame: Blame,
        leading: Backoff,
        reloading: Reloading,
    ) -> None:
        """leading: when the version that should lead may be tried again."""
        self._engine = engine
        self._take_up = take_up
        self._judge = judge
        self._blame = blame
        self._reloading = reloading
        self._pool: EnginePool = reloading.pool
        self._most_pins = reloading.config.engine.versions_held - 2  # without the leading version, and one take-up
        self._retry_s = reloading.config.explorer.reload.retry_s
        self._leading = leading
        self._backoff = Backoff(self._retry_s)
        self._deadly = Backoff(_DEADLY * self._retry_s)
        self._left_at: dict[int, int] = {}  # by leaving version: the generation that announced it
        self._held_at = 0.0  # time.monotonic(): when the leases were last renewed

    def take_over(self) -> None:
        """Announce again what leaves: the previous owner may have served it, and others may have requests for it.

        Versions that failed here before may be loaded at once, except those that the engine died of repeatedly.
        """
        self._left_at.clear()
        self._backoff = Backoff(self._retry_s)
        self._engine.refused |= self._deadly.waiting()

    async def tend(self) -> None:
        """Load pinned adapters, unload others. Raises EngineError, LedgerError."""
        before = self._take_up.served
        await self._take_up.read_present()
        if lost := [name for name in before.values() if name not in self._take_up.present]:
            self._pool.check(self._engine, f"it lost {', '.join(lost)} in a restart")
            return
        if not await self._adopt():
            return
        await self._forget_given_up()
        pins = await self._read_pins(self._engine.version)
        self._forget_ended(pins)
        await self.bring_in_pins(pins)
        stays = {self._engine.version, *pins, *self._leading.waiting_for_room()}  # one may be loaded, but not proven
        must_announce = await self._retire_all_but(stays)
        if must_announce or self._engine.versions != self._take_up.names(0):  # lost adapters were loaded again
            await self._announce()
        await self._unload()
        if time.monotonic() > self._held_at + _RENEW_S:
            await self._reloading.writer.write(self._take_up.note)
            self._held_at = time.monotonic()

    async def renew_leases(self) -> None:
        """Renew the leases on what the engine has, without end: `tend` may wait long for a load."""
        engine, reloading = self._engine, self._reloading
        while True:
            await asyncio.sleep(until_next_tick(_RENEW_S))
            if engine.state is EngineState.UNAVAILABLE or not reloading.leases.holds(engine.url):
                continue
            try:
                await reloading.writer.write(self._take_up.renew)
            except LedgerError as error:
                log.debug("leases not renewed: the ledger is unavailable", engine=engine.name, reason=str(error))

    async def _adopt(self) -> bool:
        """Prove the version that the previous owner served, so that it is not unloaded. Returns whether it is proven.

        If it is not, the engine is closed, unless it only had no room: it serves on what the previous owner has proven.
        """
        version = self._engine.version
        if not version or version in self._take_up.served:
            return True
        if self._backoff.wait_s(version):
            return False
        try:
            reason = await self._bring_in(version)
        except NoRoom as error:
            self._wait_for_room(version, error)
            return False
        if reason is not None:
            self._pool.check(self._engine, f"its version is not proven by this explorer: {reason}")
        return reason is None

    def _wait_for_room(self, version: int, error: NoRoom) -> None:
        log.warning("version waits for room", version=version, engine=self._engine.name, reason=str(error))
        self._backoff.note(version, error)

    async def bring_in_pins(self, pins: Collection[int] | None = None) -> None:
        """Load the pinned versions one by one. If the engine is not open yet, its opening announces them."""
        for version in await self._read_pins(None) if pins is None else pins:
            if version in self._take_up.served or self._has_to_wait(version):
                continue
            if self._take_up.room < 2 and not self._take_up.inherited(version):
                continue  # one place is for the leading version; the request waits until another version has left
            try:
                reason = await self._bring_in(version)
            except NoRoom as error:
                self._wait_for_room(version, error)
                return  # nor is there room for the others
            if reason is not None:
                log.warning("pinned version not loaded", version=version, engine=self._engine.name, reason=reason)
                self._refuse(version, reason)
            else:
                self._reloading.metrics.pins.labels("served").inc()
                self._engine.refused.pop(version, None)
                self._backoff.retry(version)
                if self._engine.is_open:
                    await self._announce()
                log.info("pinned version in service", version=version, engine=self._engine.name)

    def _has_to_wait(self, version: int) -> bool:
        """Whether a failed version has to wait: for its next retry, or until the engine serves the others."""
        if version in self._engine.refused and not self._engine.is_open:
            return True
        return self._backoff.wait_s(version) > 0.0 or self._deadly.wait_s(version) > 0.0

    def _refuse(self, version: int, reason: str, *, died: bool = False) -> None:
        """Note why the version is not served, for the callers that wait for it."""
        self._reloading.metrics.pins.labels("failed").inc()
        backoff = self._deadly if died and version in self._engine.refused else self._backoff
        backoff.note(version, reason)
        self._pool.refuse(self._engine, version, reason)

    async def _forget_given_up(self) -> None:
        """Forget failed loads of REJECTED and FAILED versions: after an operator's retry, one is loaded at once."""
        refused = self._engine.refused
        if not refused:
            return
        rows = await self._reloading.fetch(lambda c: queries.find_versions(c, list(refused)))
        for version in [version for version in refused if version not in rows or not rows[version].may_be_pinned]:
            del refused[version]
            self._backoff.retry(version)
            self._deadly.retry(version)

    def _forget_ended(self, pins: Collection[int]) -> None:
        """Forget why versions are refused that nobody pins any more: the next request for one waits for a new try.

        Not if the engine died of it repeatedly.
        """
        refused = self._engine.refused
        for version in [v for v in refused if v not in pins and not self._has_to_wait(v)]:
            if not self._deadly.reason(version):
                del refused[version]

    async def _bring_in(self, version: int) -> str | None:
        """Load and prove a version. Returns None, or why the engine does not serve it."""
        row = (await self._reloading.fetch(lambda c: queries.find_versions(c, [version]))).get(version)
        if row is None or not row.may_be_pinned:
            return "it is not on disk any more"
        reason = await self._examine_and_load(row)
        if reason is None and not await self._reloading.writer.write(lambda c: transitions.prove_version(c, version)):
            self._take_up.leave(version, self._take_up.served[version])
            return "it was rejected or given up while it was loaded"
        return reason

    async def _examine_and_load(self, row: VersionRow) -> str | None:
        """Like `_bring_in`, for a version that may be pinned."""
        try:
            try:
                target = await self._judge.examine(row)
            except EngineError as error:  # caused by root_dir, not by the engine
                return str(error)
            if target is None:
                return "its files are not there yet"
            return await self._load(target)
        except VersionError as error:
            await self._blame.reject(row, error)
            return str(error)

    async def _load(self, target: TargetVersion) -> str | None:
        """Like `_bring_in`. Raises EngineUnavailable, NotOwner, NoRoom."""
        try:
            async with while_open(self._engine):
                target = await self._take_up.stage(target)
            await self._take_up.run(target, None)
        except VersionError as error:  # if an engine has proven the version, only the copy here may be damaged
            await self._blame.condemn(target, str(error))
            return str(error)
        except (LoadUndone, ProbeMismatch) as error:
            is_technical = isinstance(error, LoadUndone) and error.is_technical
            await (self._blame.count if is_technical else self._blame.condemn)(target, str(error))
            return str(error)
        except EngineDied as error:
            self._refuse(target.version, str(error), died=True)
            await self._blame.count(target, str(error))
            raise
        except (EngineUnavailable, NotOwner, NoRoom):
            raise
        except EngineError as error:
            return str(error)
        return None

    async def _retire_all_but(self, wanted: Collection[int | None]) -> bool:
        """Send no more requests for other versions. Returns whether that has to be announced."""
        unwanted = {v: name for v, name in self._take_up.served.items() if v not in wanted}
        strays = {v: name for v, name in (await self._find_strays()).items() if v not in wanted}
        for version, name in {**unwanted, **strays}.items():
            self._take_up.leave(version, name)
        self._left_at = {v: since for v, since in self._left_at.items() if v in self._take_up.leaving}
        return bool(self._take_up.leaving.keys() - self._left_at.keys())

    async def _find_strays(self) -> dict[int, str]:
        """Return adapters of this ledger that a previous owner loaded and that are not wanted."""
        known = {*self._take_up.served.values(), *self._take_up.leaving.values()}
        unknown = [name for name in self._take_up.present if name not in known]
        strays = {version: name for name in unknown if (version := self._reloading.version_named(name)) is not None}
        if not strays:
            return {}
        rows: dict[int, VersionRow] = await self._reloading.fetch(lambda c: queries.find_versions(c, list(strays)))
        named = {
            v: strays[v] for v, r in rows.items() if self._reloading.adapter_name(v, r.manifest_sha256) == strays[v]
        }
        return {version: name for version, name in named.items() if self._take_up.is_own(version, name)}

    async def _announce(self) -> None:
        """Apply a changed set of versions here, then announce it to the others."""
        engine = self._engine
        self._pool.set_versions(engine, self._take_up.names(0))
        leaving = set(self._take_up.leaving)
        generation = await self._reloading.leases.announce(
            engine.url, engine.state, engine.version, also=self._take_up.note
        )
        self._left_at = dict.fromkeys(leaving, generation) | self._left_at
        self._held_at = time.monotonic()

    async def _unload(self) -> None:
        """Unload the leaving versions for which no explorer has, or will send, requests."""
        quiet = {v: since for v, since in self._left_at.items() if not self._engine.in_flight_of.get(v)}
        if not quiet:
            return
        followed = await self._reloading.leases.read_followed(self._engine.url)
        for version, since in quiet.items():
            if all(other.generation >= since and version not in other.ending for other in followed):
                await self._reloading.leases.require_held(self._engine.url)
                await self._take_up.unload(version)
                del self._left_at[version]
                for backoff in (self._leading, self._backoff):
                    backoff.end_waits_for_room()
                self._reloading.poller.wake()

    async def _read_pins(self, current: int | None) -> list[int]:
        """Return the versions with shares and the last used pinned ones, as many as the engine has room for.

        A version that leaves, but still has requests, takes the place of a pin, never that of a version with a share.
        """
        shares = [version for version in self._reloading.poller.shares if version not in (0, current)]
        pinned = await self._reloading.fetch(queries.pinned_versions)
        pins = [version for version in pinned if version not in (0, current, *shares)]
        busy = (version for version in self._take_up.leaving if version in self._engine.in_flight_of)
        ending = sum(version not in pins for version in busy)  # a busy pin that leaves frees no place by others leaving
        return (shares + pins[: max(0, self._most_pins - len(shares) - ending)])[: self._most_pins]
