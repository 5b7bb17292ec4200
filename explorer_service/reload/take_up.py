"""One take-up: an engine's weights are replaced by those of another version while requests are in flight.

The order keeps replies whole and rows honest: lease → stage → announce → the others acknowledge → still the owner? →
pause → load → label → resume, holding back what the engine sends → prove → let it go on. A load that fails is undone
within the same pause. Knows how; the controller decides what goes in, and what follows from a failure. Where versions
are adapters, adapter_take_up.py stands behind the same protocol.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol

from sqlalchemy import Connection

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import (
    EngineDied,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    LoadUndone,
    ProbeMismatch,
    StageFailed,
    TurnLost,
)
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.probe import Bounds, prove
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.tolerance import EngineTolerance
from shared.errors import EngineError, VersionExchanged, VersionMissing
from shared.ledger.queries.explorers import LIVE_S
from shared.log import StageLogger
from shared.versions import verify_version

log = StageLogger("reload")

FOLLOW_S = LIVE_S + 1.0  # who has not acknowledged by then is not alive
LOADING = "loading:"  # the label of an engine that may hold parts of two versions


class TakeUp(Protocol):
    """How one engine gets to serve another version. There is one for each `model.kind`."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Around `run`: so long may other engines not do the same."""

    def names(self, version: int) -> dict[int, str]:
        """What the engine serves when it has taken a version up, and under which names."""

    def note(self, connection: Connection) -> None:
        """Write what else the ledger is to know, in the transaction that announces what the engine serves."""

    async def stage(self, target: TargetVersion) -> TargetVersion:
        """The target, in the folder from which the engine will read it. The engine serves meanwhile.

        Raises VersionError when the engine's machine finds the version unsound, StageFailed when it cannot have it,
        LedgerError.
        """

    async def holds(self, target: TargetVersion) -> bool:
        """Whether the engine says that it holds the target, and proves it. Raises EngineUnavailable, LedgerError."""

    async def run(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Returns when the engine has proven that it serves the target, staged before.

        good: what it serves when that fails. Raises LoadUndone when it serves that; EngineDied when it died or hung;
        another EngineError.
        """


async def stage_target(
    admin: EngineAdmin, target: TargetVersion, shared: Reloading, in_use: Collection[int] = ()
) -> TargetVersion:
    """The target, in the folder on the engine's machine from which it will be read. Raises VersionError, StageFailed.

    Every file has its sha256 then: staging reads the files anyway, and checks them; else that is done here.
    in_use: versions that the engine may read again.
    """
    row, kind, root = target.row, shared.config.model.kind, shared.config.root
    if row.kind != kind:
        raise StageFailed(
            f"version {row.version} is of the kind {row.kind!a}, and model.kind is {kind} here; start all processes of "
            "this ledger with the same model.kind"
        )
    await shared.lease_files(shared.leases.key(admin.url), row.version)
    try:
        with shared.metrics.reload_stage.time():
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


class FullTakeUp:
    """Replaces all weights of one engine in place."""

    def __init__(self, engine: Engine, admin: EngineAdmin, tolerance: EngineTolerance, shared: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._tolerance = tolerance
        self._shared = shared
        self._pool = shared.pool
        self._leases = shared.leases
        self._settings = shared.config.explorer.reload
        self._generation: int | None = None  # of the move that is under way

    def alone(self) -> AbstractAsyncContextManager[None]:
        """One engine of all stands still at a time."""
        return self._shared.reload_lease.taken()

    def names(self, version: int) -> dict[int, str]:
        """That one, under the configured name."""
        return self._shared.named(version)

    def note(self, connection: Connection) -> None:
        """The engine's row says all of it."""

    async def stage(self, target: TargetVersion) -> TargetVersion:
        return await stage_target(self._admin, target, self._shared)

    async def holds(self, target: TargetVersion) -> bool:
        if await self._admin.read_label() != target.label:
            return False
        await self._leases.require_held(self._engine.url)
        if not self._engine.is_open:  # requests may stand in it
            self._pool.hold_back(self._engine)
        try:
            await self._admin.resume()  # it may have been left paused
            await self._tolerance.prove_started(self._admin, target)
        except EngineUnavailable:
            raise
        except EngineError as error:
            log.warning("engine does not hold what it says", engine=self._engine.name, reason=str(error))
            self._pool.spoil(self._engine, str(error))
            self._leases.note_spoiled(self._engine.url)
            return False
        if self._engine.hold.is_on:  # an owner that died may have loaded it under them
            self._note_switch(target.version, self._engine.hold.since)
        return True

    async def run(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Returns when the engine has proven that it holds the target, staged before.

        good: what goes back in when the load fails. Raises TurnLost when nothing was done; NotOwner and LedgerError
        when this explorer may not go on: the engine does nothing, or stands, until it is looked at again; LoadUndone
        when the load failed and `good` is back, proven, with all requests whole; EngineDied when the engine died or
        hung, or could not be brought back and is started anew; another EngineError when it went on with weights that
        it cannot prove: what was in flight is spoiled.
        """
        bounds = {one.version: await self._tolerance.bounds(one) for one in (target, good) if one is not None}
        mode = await self._clear_the_way(target)
        paused_at = time.monotonic()
        await self._admin.pause(mode)
        try:
            stood_at = time.monotonic()
            undone = await self._load_or_undo(target, good)
            held = target if undone is None or good is None else good
            switched_at = (stood_at + time.monotonic()) / 2  # far from the last token before and the first one after
            self._note_switch(held.version, switched_at)
            await self._resume(held, bounds[held.version], paused_at)
        except EngineUnavailable as error:
            raise EngineDied(str(error)) from error
        self._shared.metrics.reload_gap.observe(time.monotonic() - paused_at)
        if undone is not None:
            raise undone

    def _note_switch(self, version: int, switched_at: float) -> None:
        """The weights were replaced under what is in flight, here and at other explorers. switched_at: monotonic."""
        if self._pool.switch(self._engine, self._shared.named(version), switched_at):
            self._leases.note_switch(self._engine.url, switched_at)

    async def _resume(self, held: TargetVersion, bounds: Bounds, paused_at: float) -> None:
        """Let the engine sample again, and hold back what it sends until it has proven what it holds."""
        metrics = self._shared.metrics
        await self._require_ours()
        self._pool.hold_back(self._engine)
        try:
            await self._admin.resume()
            metrics.reload_pause.observe(time.monotonic() - paused_at)
            with metrics.reload_proof.time():
                await self._prove(held, bounds)
        except EngineError as error:
            self._pool.spoil(self._engine, str(error))
            self._leases.note_spoiled(self._engine.url)
            raise
        self._pool.go_on(self._engine)

    async def _prove(self, held: TargetVersion, bounds: Bounds) -> None:
        """Raises ProbeMismatch, also for a probe that an engine refuses which is well: vLLM has no answer for logprobs
        that are no numbers, and none for tokens that it does not know."""
        try:
            await prove(self._admin, held.manifest.probe, bounds)
        except EngineRefused as error:
            await self._admin.check_health()  # the process that answers may outlive the one that computes
            raise ProbeMismatch(f"the probe of version {held.version} is refused: {error}") from error

    async def _clear_the_way(self, target: TargetVersion) -> str:
        """Nobody gives the engine new chats any more. Returns how to pause it."""
        engine, drain_s = self._engine, 0.0
        generation = self._generation = await self._leases.announce(engine.url, EngineState.RELOADING, engine.version)
        try:
            if self._settings.streams == "finish":
                drain_s = self._settings.drain_s
                self._pool.close(engine, f"taking up version {target.version}")
                await self._pool.wait_drained(engine, drain_s)
            seeded = await self._leases.wait_followed(engine.url, generation, drain_s + FOLLOW_S)
            if not await self._leases.confirm(engine.url, generation, also=self._shared.reload_lease.renew):
                raise TurnLost(f"another engine takes up a version now; {engine.name} waits for its turn again")
        finally:  # the others were told: the engine opens only with another announcement
            self._pool.close(engine, f"taking up version {target.version}")
        return "wait" if seeded or engine.seeded_in_flight else "keep"

    async def _load_or_undo(self, target: TargetVersion, good: TargetVersion | None) -> LoadUndone | None:
        """The error to report when `good` is in the engine instead of the target."""
        try:
            await self._load(target)
        except (EngineRefused, EngineTimeout) as error:
            if good is None:
                raise
            log.error("load failed", version=target.version, engine=self._engine.name, reason=str(error))
            try:
                await self._load(good)
            except (EngineRefused, EngineTimeout) as again:
                await self._restart(f"version {good.version} cannot go back in ({again})")
            return LoadUndone(str(error), is_technical=isinstance(error, EngineTimeout))
        return None

    async def _load(self, target: TargetVersion) -> None:
        await self._require_ours()
        await self._admin.write_label(f"{LOADING}{target.version}")
        await self._require_ours()
        await self._admin.reload_weights(target.folder)
        await self._admin.reset_prefix_cache()
        await self._require_ours()
        await self._admin.write_label(target.label)

    async def _require_ours(self) -> None:
        """Raise NotOwner when another explorer may have moved the engine while this one stood still."""
        await self._leases.require_held(self._engine.url, self._generation)

    async def _restart(self, reason: str) -> NoReturn:
        """The engine holds parts of two versions, and sampling from them would kill it anyway."""
        await self._require_ours()
        try:
            await self._admin.restart()
        except EngineRefused as error:
            raise EngineError(f"{reason}; restart engine {self._admin.url}") from error
        raise EngineUnavailable(f"{reason}; engine {self._admin.url} is started anew")
