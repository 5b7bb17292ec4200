"""Stage 9, reload: engines take up versions, and prove it before they serve under a version's name.

One controller for each engine decides what it must hold, moves it there (take_up.py; adapter_take_up.py), and decides
what follows when that fails (blame.py). What an engine holds is read, from the label that each load writes or from its
adapters' names; that it computes what it should is measured, by the manifest's probe. Of several explorers on one
ledger one owns the engine, and the others follow (follow.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from sqlalchemy import Connection

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.pool import Engine, EngineState
from explorer_service.errors import EngineDied, EngineUnavailable, LoadUndone, NotOwner, ProbeMismatch, StageFailed
from explorer_service.reload.adapter_controller import AdapterController
from explorer_service.reload.adapter_take_up import AdapterTakeUp
from explorer_service.reload.blame import Backoff, Blame, failure_name
from explorer_service.reload.follow import EngineFollower
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.ownership import POLL_S
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import LOADING, FullTakeUp, TakeUp
from explorer_service.reload.tolerance import EngineTolerance
from shared.clock import until_next_tick
from shared.errors import EngineError, LedgerError, VersionError
from shared.ledger import transitions
from shared.ledger.queries import VersionRow, list_versions
from shared.log import StageLogger

log = StageLogger("reload")

HEALTH_INTERVAL_S = 1.0
STALLED_AFTER_S = 10.0  # chats that get no answer for so long may wait in an engine that somebody paused


class EngineController:
    """Brings one engine to the version that should serve. `run()` ends only by cancellation."""

    def __init__(self, engine: Engine, admin: EngineAdmin, shared: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._shared = shared
        self._pool = shared.pool
        self._leases = shared.leases
        self._settings = shared.config.explorer.reload
        self._judge = VersionJudge(shared.config, shared.ledger)
        tolerance = EngineTolerance(shared.config, shared.ledger, shared.writer, shared.leases.key(engine.url))
        self._follower = EngineFollower(engine, shared)
        self._blame = Blame(engine, self._judge, shared)
        self._adapters: AdapterController | None = None
        if shared.loads_adapters:
            adapters = AdapterTakeUp(engine, admin, tolerance, shared)
            self._adapters = AdapterController(engine, adapters, self._judge, self._blame, shared)
        self._take_up: TakeUp = FullTakeUp(engine, admin, tolerance, shared) if self._adapters is None else adapters
        self._backoff = Backoff(self._settings.retry_s)
        self._is_owner = False
        self._newest: VersionRow | None = None  # as of the last look at the ledger
        self._served: TargetVersion | None = None  # the last one that this explorer has proven there
        self._reloaded_at = -self._settings.min_interval_s  # time.monotonic()
        self._healthy_at = 0.0  # time.monotonic()
        self._moved_at = time.monotonic()  # when no chat waited, or the engine was resumed
        self._ledger_unavailable = False

    async def run(self) -> None:
        """Look after the engine for ever."""
        while True:
            revision = self._shared.poller.revision
            try:
                await self._reconcile()
                self._ledger_unavailable = False
            except LedgerError as error:
                if not self._ledger_unavailable:  # logged once, until it is back
                    log.warning("the ledger is unavailable: no new version can be seen", reason=str(error))
                self._ledger_unavailable = True
            except NotOwner:
                self._is_owner = False
            except EngineUnavailable as error:
                await self._withdraw(str(error))
            except (EngineError, VersionError) as error:
                log.error("engine refuses", engine=self._engine.name, reason=str(error))
                self._shared.metrics.reload_failures.labels("refused").inc()
                self._pool.check(self._engine, str(error))
            await self._wait(revision)

    async def _wait(self, revision: int) -> None:
        """Until there may be something to do."""
        if self._is_owner and self._engine.is_open:
            backoff_s = 0.0 if self._newest is None else self._backoff.wait_s(self._newest.version)
            interval_s = until_next_tick(HEALTH_INTERVAL_S)
            await self._shared.poller.wait_change(revision, min(interval_s, backoff_s or interval_s))
        elif not self._is_owner and self._engine.state is EngineState.RELOADING:
            await asyncio.sleep(POLL_S)
        else:
            await asyncio.sleep(self._settings.poll_interval_s)

    async def _reconcile(self) -> None:
        engine = self._engine
        await self._shared.reload_lease.settle()
        await self._check_health()
        if not await self._leases.acquire(engine.url):
            self._is_owner = False
            await self._follower.follow()
            return
        newest = self._newest = self._shared.poller.newest()
        if not self._is_owner:
            await self._inherit(newest)
            self._is_owner = True
        if engine.state is EngineState.UNAVAILABLE:
            self._pool.check(engine, "its version is not proven yet")
            log.info("engine answers", engine=engine.name, url=engine.url)
        if newest is None:  # nothing is published yet: it serves what it was started with
            if engine.state is not EngineState.SERVING:
                await self._admin.resume()
                await self._leases.announce(engine.url, EngineState.SERVING, 0)
                self._pool.serve(engine, self._take_up.names(0), engine.sampling_defaults, version=0)
        elif engine.state is not EngineState.SERVING or engine.version != newest.version or self._served is None:
            await self._bring_in(newest)
        if self._adapters is not None and engine.is_open:
            await self._adapters.tend()

    async def _check_health(self) -> None:
        answered_at = max(self._healthy_at, self._engine.answered_at)
        if not self._engine.is_open or time.monotonic() - answered_at > HEALTH_INTERVAL_S:
            await self._admin.check_health()
            self._healthy_at = time.monotonic()
            await self._resume_if_stalled()

    async def _resume_if_stalled(self) -> None:
        """Chats get no answer, and none of ours paused the engine: resume it, which is harmless when nobody has."""
        engine, now = self._engine, time.monotonic()
        if not (self._is_owner and engine.in_flight and engine.is_open):
            self._moved_at = now
        elif now - max(self._moved_at, engine.answered_at) > STALLED_AFTER_S:
            self._moved_at = now
            await self._admin.resume()

    async def _inherit(self, newest: VersionRow | None) -> None:
        """The owner before may have died in the middle of a take-up: may what was in flight then go on?

        It may, when the engine was never resumed with other weights than those that it should hold or has proven.
        """
        if self._engine.is_open:
            await self._follower.follow()  # to what the owner before did last
        row = await self._leases.read(self._engine.url)
        if row is None or row.state != EngineState.RELOADING:
            return
        label = await self._admin.read_label() or ""
        known = [row.version] if newest is None else [row.version, newest.version]
        if not label.startswith((LOADING, *(f"{version}:" for version in known))):
            self._pool.spoil(self._engine, "an explorer died while it reloaded the engine")
            self._leases.note_spoiled(self._engine.url)

    async def _withdraw(self, reason: str) -> None:
        was_available = self._engine.state is not EngineState.UNAVAILABLE
        self._pool.withdraw(self._engine, reason)
        if was_available:
            log.warning("engine is unavailable", engine=self._engine.name, reason=reason)
            if self._is_owner:
                with contextlib.suppress(LedgerError, NotOwner):  # the others ask the engine's health themselves
                    await self._leases.announce(self._engine.url, EngineState.UNAVAILABLE, None)

    async def _bring_in(self, newest: VersionRow) -> None:
        """Serve the newest; while it is not there, or failed here, an idle engine serves the last good one."""
        target, is_open = None, self._engine.is_open
        if is_open and time.monotonic() < self._reloaded_at + self._settings.min_interval_s:
            return
        if not self._backoff.wait_s(newest.version):
            target = await self._examine(newest)
        if target is None and not is_open:
            target = await self._find_good(newest.version)
        if target is None or self._backoff.wait_s(target.version):
            return
        if await self._has(target):
            await self._serve(target)
        else:
            await self._replace(target, newest)

    async def _has(self, target: TargetVersion) -> bool:
        """Whether the engine serves the target already, or says that it holds it, and proves it."""
        if self._engine.is_open and self._engine.version != target.version:
            return False
        served = self._served if self._engine.is_open else None  # still, where it did not take up a newer one
        return (served is not None and served.version == target.version) or await self._take_up.holds(target)

    async def _examine(self, row: VersionRow) -> TargetVersion | None:
        """A version that may go in; None: it is not there yet, or rejected now."""
        try:
            return await self._judge.examine(row)
        except VersionError as error:
            await self._blame.reject(row, str(error))
            return None

    async def _replace(self, target: TargetVersion, newest: VersionRow) -> None:
        version = target.version
        try:
            good = await self._stage_good(version)  # first: of what is staged, what was asked for last stays
            target = await self._take_up.stage(target)
        except (StageFailed, VersionError) as error:
            await self._stay(version, error)
            if isinstance(error, VersionError):
                await self._blame.condemn(target, str(error))
            return
        async with self._take_up.alone():
            now = self._shared.poller.newest()
            if now is None or now.version != newest.version:
                return  # overtaken, or rejected, while it waited for the lease
            started = time.monotonic()
            try:
                await self._take_up.run(target, good)
            except (LoadUndone, ProbeMismatch) as error:
                self._note_failure(version, error)
                if good is None:
                    raise
                if isinstance(error, ProbeMismatch):
                    await self._take_up.run(good, None)
                if isinstance(error, LoadUndone) and error.is_technical:
                    await self._blame.count(target, str(error))
                else:
                    await self._blame.condemn(target, str(error))
                await self._serve(good)
            except EngineDied as error:
                self._note_failure(version, error)
                await self._blame.count(target, str(error))
                raise
            except StageFailed as error:
                await self._stay(version, error)
            except NotOwner:
                raise
            except EngineError as error:
                self._note_failure(version, error)
                raise
            else:
                self._reloaded_at = time.monotonic()
                await self._serve(target, took_ms=1000 * (time.monotonic() - started))

    async def _stay(self, version: int, error: EngineError | VersionError) -> None:
        """Nothing was done to the engine: it serves on, if it does."""
        self._note_failure(version, error)
        if self._engine.is_open and self._served is not None:
            await self._serve(self._served)

    async def _stage_good(self, failed: int) -> TargetVersion | None:
        """What goes back in when a load fails, where the engine can read it. Raises StageFailed."""
        if (good := await self._find_good(failed)) is None:
            return None
        try:
            return await self._take_up.stage(good)
        except VersionError as error:
            if good is not self._served:
                await self._blame.reject(good.row, str(error))
            raise StageFailed(f"what would go back in is damaged: {error}") from error

    def _note_failure(self, version: int, error: EngineError | VersionError) -> None:
        log.error("version not taken up", version=version, engine=self._engine.name, reason=str(error))
        self._shared.metrics.reload_failures.labels(failure_name(error)).inc()
        self._backoff.note(version, str(error))

    async def _serve(self, target: TargetVersion, **fields: float) -> None:
        """The engine has proven the target: it gets chats under its name."""
        engine, version, newest = self._engine, target.version, self._shared.poller.newest()
        assert newest is not None
        if version == newest.version:
            self._backoff.forget(version)
        degraded = self._backoff.reason(newest.version)
        by, key = f"engine {engine.name}", self._leases.key(engine.url)
        if self._adapters is not None and not engine.is_open:
            await self._adapters.bring_in_pins()  # one that has started anew gets its set back before it takes chats

        def serve(connection: Connection) -> None:
            transitions.serve_version(connection, version, by=by, engine=key)
            self._take_up.note(connection)

        state = EngineState.DEGRADED if degraded else EngineState.SERVING
        await self._leases.announce(engine.url, state, version, also=serve)
        self._served = target
        self._pool.serve(engine, self._take_up.names(version), target.defaults, degraded, version)
        self._shared.metrics.reloads.labels("served").inc()
        self._shared.metrics.reload_version.labels(engine.name).set(version)
        log.info("version in service", version=version, engine=engine.name, **fields)

    async def _find_good(self, failed: int) -> TargetVersion | None:
        """What this engine has served before, or else the newest other version that has ever served, or the base."""
        rows = await asyncio.to_thread(self._servable, failed)
        if self._served is not None and any(row.version == self._served.version for row in rows):
            return self._served
        for row in reversed(rows):
            may_go_in = (row.served_at is not None or row.version == 0) and not self._backoff.wait_s(row.version)
            if may_go_in and (target := await self._examine(row)) is not None:
                return target
        return None

    def _servable(self, failed: int) -> list[VersionRow]:
        with self._shared.ledger.read() as connection:
            rows = [row for row in list_versions(connection) if row.version != failed and row.may_serve]
        return [row for row in rows if row.version == 0 or row.kind == self._shared.config.model.kind]
