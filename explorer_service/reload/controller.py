"""Stage 9, reload: engines load versions, and prove them before they serve.

Each engine has a controller. It chooses the engine's version (choice.py), has it loaded (take_up.py), and handles
failures (recovery.py, blame.py). It reads which version an engine holds from its label or its adapters' names, and
measures by the probe that it computes correctly. Of several explorers, one owns it, and the others follow (follow.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from sqlalchemy import Connection

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import EngineTimeout, EngineUnavailable, NotOwner, OtherWeights, StageFailed, TurnLost
from explorer_service.reload.adapter_controller import AdapterController
from explorer_service.reload.adapter_take_up import AdapterTakeUp
from explorer_service.reload.blame import Backoff, Blame
from explorer_service.reload.choice import VersionChoice
from explorer_service.reload.follow import EngineFollower
from explorer_service.reload.health import HEALTH_INTERVAL_S, EngineHealth, while_open
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.ownership import POLL_S
from explorer_service.reload.recovery import Recovery
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import FullTakeUp, TakeUp
from explorer_service.reload.tolerance import EngineTolerance
from explorer_service.reload.unproven import serve_unproven
from shared.clock import until_next_tick
from shared.errors import EngineError, LedgerError, VersionError
from shared.experience import VersionState
from shared.ledger import transitions
from shared.ledger.queries import VersionRow
from shared.log import StageLogger

log = StageLogger("reload")


class EngineController:
    """Moves one engine to the version that should serve. `run()` ends only by cancellation."""

    def __init__(self, engine: Engine, admin: EngineAdmin, reloading: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._reloading = reloading
        self._pool = reloading.pool
        self._leases = reloading.leases
        self._settings = reloading.config.explorer.reload
        judge = VersionJudge(reloading.config, reloading.ledger)
        tolerance = EngineTolerance(engine, reloading)
        self._follower = EngineFollower(engine, admin, reloading)
        self._blame = Blame(engine, judge, reloading)
        self._backoff = Backoff(self._settings.retry_s)
        self._take_up: TakeUp = FullTakeUp(engine, admin, tolerance, reloading)
        self._adapters: AdapterController | None = None
        if reloading.loads_adapters:
            self._take_up = adapters = AdapterTakeUp(engine, admin, tolerance, reloading)
            self._adapters = AdapterController(engine, adapters, judge, self._blame, self._backoff, reloading)
        self._choice = VersionChoice(judge, self._blame, self._take_up, self._backoff, reloading)
        self._recovery = Recovery(admin, self._take_up, self._blame, reloading)
        self._health = EngineHealth(engine, admin, reloading)
        self._is_owner = False
        self._wanted: VersionRow | None = None  # according to the last read of the ledger
        self._served: TargetVersion | None = None  # the last version that this explorer has proven there
        self._not_proven: int | None = None  # the version that it was restarted on and did not prove
        self._paused_at = -self._settings.min_interval_s  # time.monotonic(): the end of the last take-up

    async def run(self) -> None:
        """Control the engine without end."""
        renewals = [] if self._adapters is None else [self._adapters.renew_leases()]
        await asyncio.gather(self._control(), *renewals)

    async def _control(self) -> None:
        while True:
            revision = self._reloading.poller.revision
            try:
                await self._reconcile()
            except LedgerError as error:
                log.debug("tried again: the ledger is unavailable", engine=self._engine.name, reason=str(error))
            except NotOwner:
                self._is_owner = False
            except EngineUnavailable as error:
                await self._withdraw(str(error))
            except (EngineError, VersionError) as error:
                log.error("engine refused a request", engine=self._engine.name, reason=str(error))
                self._reloading.metrics.reload_failures.labels("refused").inc()
                self._pool.check(self._engine, str(error))
            await self._wait(revision)

    async def _wait(self, revision: int) -> None:
        """Wait until there may be work."""
        if self._is_owner and self._engine.is_open:
            backoff_s = 0.0 if self._wanted is None else self._backoff.wait_s(self._wanted.version)
            interval_s = until_next_tick(HEALTH_INTERVAL_S)
            await self._reloading.poller.wait_change(revision, min(interval_s, backoff_s or interval_s))
        elif not self._is_owner and self._engine.state is EngineState.RELOADING:
            await asyncio.sleep(POLL_S)
        else:
            await asyncio.sleep(min(self._settings.poll_interval_s, HEALTH_INTERVAL_S))

    async def _reconcile(self) -> None:
        engine = self._engine
        await self._reloading.reload_lease.settle()
        if self._is_owner or not self._follower.owner_reloads:  # a loading engine may not answer; its owner waits
            await self._health.check()
        if not await self._leases.acquire(engine.url):
            self._is_owner = False
            await self._follower.follow()
            return
        before, wanted = self._wanted, self._reloading.poller.wanted()
        self._wanted = wanted
        if wanted is not None and wanted != before and wanted.state == VersionState.PUBLISHED:
            self._backoff.retry(wanted.version)  # just published, or an operator requested a retry
        if not self._is_owner:
            await self._follower.inherit(wanted)
            self._is_owner, self._served = True, None  # the previous owner may have loaded anything
            if self._adapters is not None:
                self._adapters.take_over()
        served = self._served
        if engine.state is EngineState.UNAVAILABLE:
            self._pool.check(engine, "its version is not proven yet")
            log.info("engine answers", engine=engine.name, url=engine.url)
        try:
            await self._health.require_weights(served)
        except OtherWeights as error:
            await self._distrust(str(error))
        is_told = self._leases.has_told(engine.url, engine.state, engine.version)
        if wanted is None:
            await serve_unproven(engine, self._admin, self._take_up.names(0), self._reloading)
        elif served and engine.is_open and engine.version == served.version and not is_told:
            await self._serve(served, again=True)  # a reload was announced, but not begun
        elif engine.state is not EngineState.SERVING or engine.version != wanted.version or self._served is None:
            await self._bring_in(wanted)
        if self._adapters is not None and engine.is_open:
            await self._adapters.tend()

    async def _distrust(self, reason: str) -> None:
        """Spoil requests in flight: after a foreign load or a restart, any version may have sampled them."""
        log.error("engine does not hold the version that it serves", engine=self._engine.name, reason=reason)
        self._pool.spoil(self._engine, reason)
        self._leases.note_spoiled(self._engine.url)
        self._pool.check(self._engine, reason)
        await self._leases.announce(self._engine.url, EngineState.CHECKING, None)

    async def _withdraw(self, reason: str) -> None:
        self._pool.withdraw(self._engine, reason)
        with contextlib.suppress(LedgerError, NotOwner):  # the others check the engine's health, too
            self._is_owner = self._is_owner and await self._leases.report_away(self._engine)
            if not self._is_owner:
                await self._follower.follow_unreached()

    async def _bring_in(self, wanted: VersionRow) -> None:
        """Serve the wanted version; until it is loaded, or while it is missing or failed here, the last good one."""
        engine, target = self._engine, None
        is_withdrawn = engine.is_open and await self._choice.is_withdrawn(engine.version, wanted.version)
        if self._is_too_soon(wanted, is_withdrawn=is_withdrawn):
            return
        if self._backoff.wait_s(wanted.version):
            if await self._serve_held(wanted):
                return
        else:
            try:
                target = await self._choice.examine(wanted)
            except EngineError as error:
                if not (engine.is_open or isinstance(error, StageFailed)):
                    raise  # root_dir is not mounted, or belongs to another ledger
                await self._stay(wanted.version, error)
        if target is not None and await self._has(target):
            await self._serve(target, again=True)
            return
        is_unproven = not engine.is_open or (is_withdrawn if target is None else self._served is None)
        if is_unproven and (target is None or self._adapters is None):
            good = await self._choice.find_good(wanted.version, self._served)
            if good is not None and await self._has(good):
                if not engine.is_open or good is not self._served:  # otherwise it is announced already
                    await self._serve(good, again=True)
            elif target is None:
                target = good
        waits = self._is_too_soon(wanted, is_withdrawn=is_withdrawn)  # it may have been opened above
        if target is not None and not waits and not self._backoff.wait_s(target.version):
            await self._replace(target, wanted)

    async def _serve_held(self, failed: VersionRow) -> bool:
        """Serve a version whose load failed here if the engine was restarted on it. Returns whether it was."""
        if self._engine.is_open or not failed.is_proven or failed.version == self._not_proven:
            return False  # an engine starts on proven versions only
        try:
            target = await self._choice.examine(failed)
            if target is None or not await self._has(target):
                return False
        except EngineUnavailable as error:  # with the last good version it may answer
            self._not_proven = failed.version
            if not isinstance(error, EngineTimeout):
                raise
            if self._engine.hold.is_on:
                self._pool.spoil(self._engine, str(error))
                self._leases.note_spoiled(self._engine.url)
            return False
        except EngineError:  # its next load finds this, too
            return False
        await self._serve(target, again=True)
        return True

    def _is_too_soon(self, wanted: VersionRow, *, is_withdrawn: bool) -> bool:
        """Whether the engine serves an earlier version that it has to serve for a while yet."""
        rises = self._engine.is_open and self._served is not None and wanted.version > (self._engine.version or 0)
        is_early = time.monotonic() < self._paused_at + self._settings.min_interval_s
        return rises and not is_withdrawn and (is_early or self._recovery.must_wait)

    async def _has(self, target: TargetVersion) -> bool:
        """Whether the engine serves the target already, or holds it by its label and proves it."""
        if self._engine.is_open and self._engine.version != target.version:
            return False
        served = self._served if self._engine.is_open else None  # also after a newer version's take-up failed
        if (served is not None and served.version == target.version) or await self._take_up.holds(target):
            return True
        if self._adapters is None and await self._health.is_contradicted(target):
            await self._distrust(f"it does not prove version {target.version}")
        return False

    async def _replace(self, target: TargetVersion, wanted: VersionRow) -> None:
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with while_open(self._engine, lambda: self._health.look(self._served)):
                    good = await self._choice.stage_good(target.version, self._served)  # first: the last staged is kept
                    target = await self._take_up.stage(target)
                    await turn.enter_async_context(self._take_up.alone())
            except OtherWeights as error:
                await self._distrust(str(error))
                return
            except (StageFailed, VersionError) as error:
                await self._stay(target.version, error)
                if isinstance(error, VersionError):
                    await self._blame.condemn(target, str(error))
                return
            if (now := self._reloading.poller.wanted()) is not None and now.version == wanted.version:  # not overtaken
                await self._move(target, good)

    async def _move(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Run the take-up of a staged target."""
        version, started, was_open = target.version, time.monotonic(), self._engine.is_open
        try:
            await self._take_up.run(target, good)
        except TurnLost as error:
            log.warning("version not taken up yet", version=version, engine=self._engine.name, reason=str(error))
            if was_open and self._served is not None:
                await self._serve(self._served, again=True)
        except StageFailed as error:
            await self._stay(version, error)
        except NotOwner:
            raise
        except EngineError as error:
            self._paused_at = time.monotonic()
            self._blame.note(version, error, self._backoff)
            await self._serve(await self._recovery.go_back(target, good, error), again=True)
        else:
            self._paused_at = time.monotonic()
            self._recovery.forget()
            await self._serve(target, took_ms=1000 * (self._paused_at - started))

    async def _stay(self, version: int, error: EngineError | VersionError) -> None:
        """Handle a failure before the engine was changed: it continues to serve, if it is open."""
        self._blame.note(version, error, self._backoff)
        if self._engine.is_open and self._served is not None:
            await self._serve(self._served, again=True)

    async def _serve(self, target: TargetVersion, *, again: bool = False, **fields: float) -> None:
        """Open the engine, which has proven the target, unless that was rejected meanwhile. again: no new take-up."""
        engine, version, wanted = self._engine, target.version, self._reloading.poller.wanted()
        degraded = ""
        if wanted is not None and version == wanted.version:
            self._backoff.forget(version)
        elif wanted is not None:
            degraded = self._recovery.reason or self._backoff.reason(wanted.version)
        by, key = f"engine {engine.name}", self._leases.key(engine.url)
        if self._adapters is not None and not engine.is_open:
            await self._adapters.bring_in_pins()  # a restarted engine gets its adapters again before it gets chats

        def serve(connection: Connection) -> None:
            if not transitions.serve_version(connection, version, by=by, engine=key):
                raise VersionError(f"version {version} was rejected or given up while it was taken up")
            self._take_up.note(connection)

        state = EngineState.DEGRADED if degraded else EngineState.SERVING
        try:
            await self._leases.announce(engine.url, state, version, also=serve)
        except VersionError as error:  # nothing was announced; the next round loads a version that may serve
            log.warning("version not in service", version=version, engine=engine.name, reason=str(error))
            self._served = None
            await self._reloading.poller.refresh()
            return
        self._served, self._not_proven = target, None
        self._recovery.note_served()
        self._pool.serve(engine, self._take_up.names(version), target.defaults, degraded, version)
        self._reloading.metrics.reloads.labels("served").inc(0 if again else 1)
        log.info("version in service", version=version, engine=engine.name, **fields)
