"""The take-up of a full version: replace an engine's weights while requests are in flight.

The order keeps replies whole and rows correctly labelled: lease → stage → announce → the others acknowledge → check the
ownership → pause → load → label → resume, with replies held back → prove → forward replies. A load that fails is undone
within the same pause. The controller chooses the version, and handles failures. For adapters, adapter_take_up.py
implements the same protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn, Protocol

from sqlalchemy import Connection

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import (
    EngineDied,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    LoadsRefused,
    LoadUndone,
    StageFailed,
    TurnLost,
)
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.probe import Bounds, prove
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.tolerance import EngineTolerance
from shared import clock
from shared.errors import EngineError, LedgerError, VersionExchanged, VersionMissing
from shared.ledger.queries.explorers import LIVE_S
from shared.log import StageLogger
from shared.versions import verify_version

log = StageLogger("reload")

FOLLOW_S = LIVE_S + 1.0  # an explorer that has not acknowledged by then is not alive
LOADING = "loading:"  # prefix of the label while an engine may hold parts of two versions


class TakeUp(Protocol):
    """Moves one engine to another version. Each `model.kind` has one."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Wraps `run` for exclusion: no other engine does the same meanwhile."""

    def names(self, version: int) -> dict[int, str]:
        """Return what the engine serves after the take-up of a version, with the model names."""

    def note(self, connection: Connection) -> None:
        """Make further writes in the transaction that announces what the engine serves."""

    async def stage(self, target: TargetVersion) -> TargetVersion:
        """Stage the target while the engine serves. Returns it with the folder that the engine will read.

        Raises VersionError if the engine's machine finds the version unsound, StageFailed if it cannot get it,
        LedgerError.
        """

    async def holds(self, target: TargetVersion) -> bool:
        """Whether the engine reports that it holds the target, and proves it. Raises EngineUnavailable, LedgerError."""

    async def run(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Load and prove the staged target.

        good: what the engine serves if that fails. Raises LoadUndone if it serves that; EngineDied if it died or hung;
        other EngineErrors.
        """


async def stage_target(
    admin: EngineAdmin, target: TargetVersion, reloading: Reloading, in_use: Collection[int] = ()
) -> TargetVersion:
    """Stage the target, and return it with its folder on the engine's machine. Raises VersionError, StageFailed.

    The sha256 of every file is checked: by staging, which reads the files, or else here. in_use: versions that the
    engine may read again.
    """
    row, kind, root = target.row, reloading.config.model.kind, reloading.config.root
    if row.kind != kind:
        raise StageFailed(
            f"version {row.version} is of the kind {row.kind!a}, and model.kind is {kind} here; start all processes of "
            "this ledger with the same model.kind"
        )
    await reloading.lease_files(reloading.leases.key(admin.url), row.version)
    try:
        with reloading.metrics.reload_stage.time():
            folder = await admin.stage(row.version, row.manifest_sha256, in_use)
            if folder is None and not target.is_verified:
                await asyncio.to_thread(verify_version, root / row.path, row.manifest_sha256)
    except (EngineRefused, EngineTimeout, VersionMissing, VersionExchanged) as error:
        raise StageFailed(str(error)) from error
    if folder is None and target.manifest.form == "delta":
        raise StageFailed(
            f"engine {admin.url} loads whole versions only, and version {row.version} is a delta; give it an "
            "engine.staging_dir, or set versions.delta: false"
        )
    return dataclasses.replace(target, folder=folder or root.resolve() / row.path, is_verified=True)


async def restart_engine(admin: EngineAdmin, reason: str) -> NoReturn:
    """Restart an engine. Raises EngineUnavailable, or EngineError if it was not started by `flywheel engine`."""
    try:
        await admin.restart()
    except EngineRefused as error:
        raise EngineError(f"{reason}; restart engine {admin.url}") from error
    raise EngineUnavailable(f"{reason}; engine {admin.url} is being restarted")


class FullTakeUp:
    """Replaces all weights of one engine in place."""

    def __init__(self, engine: Engine, admin: EngineAdmin, tolerance: EngineTolerance, reloading: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._tolerance = tolerance
        self._reloading = reloading
        self._pool = reloading.pool
        self._leases = reloading.leases
        self._settings = reloading.config.explorer.reload
        self._generation: int | None = None  # of the current move

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Only one engine is paused at a time. The one before it may have refused the version: query the ledger."""
        async with self._reloading.reload_lease.taken():
            await self._reloading.poller.refresh()
            yield

    def names(self, version: int) -> dict[int, str]:
        """Return this version, under the configured name."""
        return self._reloading.named(version)

    def note(self, connection: Connection) -> None:
        """Nothing: the engine's row has all of it."""

    async def stage(self, target: TargetVersion) -> TargetVersion:
        return await stage_target(self._admin, target, self._reloading)

    async def holds(self, target: TargetVersion) -> bool:
        if await self._admin.read_label() != target.label:
            return False
        await self._leases.require_held(self._engine.url)
        if not self._engine.is_open:  # it may have requests
            self._pool.hold_back(self._engine)
        try:
            await self._admin.resume()  # it may still be paused
            await self._tolerance.prove_started(self._admin, target)
        except EngineUnavailable:
            raise
        except EngineError as error:
            log.warning("engine does not prove the version it reports", engine=self._engine.name, reason=str(error))
            self._pool.spoil(self._engine, str(error))
            self._leases.note_spoiled(self._engine.url)
            return False
        if self._engine.hold.is_on:  # an owner that died may have loaded it under these requests
            self._note_switch(target.version, self._engine.hold.since)
        return True

    async def run(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Load and prove the staged target.

        good: the version to fall back to if the load fails. Raises TurnLost if nothing was done; NotOwner, LedgerError
        if this explorer may not continue: until the engine is checked again, it stays idle, paused, or resumed with its
        replies held back; LoadUndone if the load failed and `good` is loaded and proven, with all requests whole;
        EngineDied if the engine died or hung, or could not be restored and is restarted; other EngineErrors if its
        weights are not proven: the requests in flight are spoiled.
        """
        bounds = {one.version: await self._tolerance.bounds(one) for one in (target, good) if one is not None}
        mode = await self._stop_new_chats(target)
        paused_at = time.monotonic()
        await self._admin.pause(mode)
        try:
            load_at = clock.since_boot_s()
            undone = await self._load_or_undo(target, good)
            held = target if undone is None or good is None else good
            switched_at = (load_at + clock.since_boot_s()) / 2  # far from the last token before and the first after
            self._note_switch(held.version, switched_at)
            await self._resume(held, bounds[held.version], paused_at)
        except EngineUnavailable as error:
            raise EngineDied(str(error)) from error
        self._reloading.metrics.reload_gap.observe(time.monotonic() - paused_at)
        if undone is not None:
            raise undone

    def _note_switch(self, version: int, switched_at: float) -> None:
        """Note, for all explorers, that weights of requests in flight changed. switched_at: clock.since_boot_s()."""
        if self._pool.switch(self._engine, self._reloading.named(version), switched_at):
            self._leases.note_switch(self._engine.url, switched_at)

    async def _resume(self, held: TargetVersion, bounds: Bounds, paused_at: float) -> None:
        """Resume the engine, and hold back its replies until it has proven its version."""
        metrics = self._reloading.metrics
        await self._require_owned()
        self._pool.hold_back(self._engine)
        try:
            await self._admin.resume()
            metrics.reload_pause.observe(time.monotonic() - paused_at)
            with self._pool.admitted(self._engine), metrics.reload_proof.time():
                await prove(self._admin, held.manifest.probe, bounds)
        except EngineError as error:
            self._pool.spoil(self._engine, str(error))
            self._leases.note_spoiled(self._engine.url)
            raise
        await self._require_owned()
        self._pool.go_on(self._engine)

    async def _stop_new_chats(self, target: TargetVersion) -> str:
        """Wait until no explorer sends the engine new chats. Returns the mode of the pause."""
        engine, drain_s = self._engine, 0.0
        generation = self._generation = await self._leases.announce(engine.url, EngineState.RELOADING, engine.version)
        try:
            if self._settings.streams == "finish":
                drain_s = self._settings.drain_s
                self._pool.close(engine, f"taking up version {target.version}")
                await self._pool.wait_drained(engine, drain_s)
            seeded = await self._leases.wait_followed(engine.url, generation, drain_s + FOLLOW_S)
            if not await self._leases.confirm(engine.url, generation, also=self._reloading.reload_lease.renew):
                raise TurnLost(f"another engine takes up a version now; {engine.name} waits for its turn again")
        finally:  # the move was announced: only another announcement opens the engine
            self._pool.close(engine, f"taking up version {target.version}")
        return "wait" if seeded or engine.seeded_in_flight else "keep"

    async def _load_or_undo(self, target: TargetVersion, good: TargetVersion | None) -> LoadUndone | None:
        """Load the target. Returns the error if `good` had to be loaded instead."""
        try:
            await self._load(target)
        except (EngineRefused, EngineTimeout) as error:
            if good is None:
                raise
            log.error("load failed", version=target.version, engine=self._engine.name, reason=str(error))
            try:
                await self._load(good)
            except (EngineRefused, EngineTimeout) as again:
                reason = f"version {good.version} cannot be loaded again ({again})"
                if isinstance(error, EngineRefused) and isinstance(again, EngineRefused):
                    await self._admin.check_health()  # the process that answers may outlive the one that computes
                    raise LoadsRefused(f"{error}; then {reason}") from again
                await self._restart(reason)
            return LoadUndone(str(error), is_technical=isinstance(error, EngineTimeout))
        return None

    async def _load(self, target: TargetVersion) -> None:
        loading = f"{LOADING}{target.version}"
        await self._require_owned()
        await self._admin.write_label(loading)
        await self._require_owned()
        try:
            await self._admin.reload_weights(target.folder)
            await self._require_owned()
        except (EngineError, LedgerError):  # it may have come late, and replaced what another owner has loaded
            if not self._leases.holds(self._engine.url):
                with contextlib.suppress(EngineError):
                    await self._admin.write_label(loading)  # so that the present owner loads again
            raise
        await self._admin.reset_prefix_cache()
        await self._require_owned()
        await self._admin.write_label(target.label)

    async def _require_owned(self) -> None:
        """Raise NotOwner if another explorer may have moved the engine while this one was suspended."""
        await self._leases.require_held(self._engine.url, self._generation)

    async def _restart(self, reason: str) -> NoReturn:
        """Restart the engine: it holds parts of two versions, and would die if it sampled from them."""
        await self._require_owned()
        await restart_engine(self._admin, reason)
