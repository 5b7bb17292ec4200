"""The take-up of an adapter: the engine loads it besides those that it serves, and is not paused.

The order: lease → stage → load under a name that no other version ever has → prove under that name. Nothing is replaced
in place, so no reply crosses versions, and no cached KV is of another version. A loaded adapter's folder is kept until
no request can use its name: vLLM reads it again after it has evicted the adapter from memory, and dies if the folder is
gone.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from sqlalchemy import Connection

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine
from explorer_service.errors import (
    EngineDied,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    LoadUndone,
    NoRoom,
    ProbeMismatch,
    StageFailed,
)
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.probe import prove
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import stage_target
from explorer_service.reload.tolerance import EngineTolerance
from shared.errors import EngineError
from shared.ledger import queries, transitions
from shared.log import StageLogger
from shared.versions import version_name

log = StageLogger("reload")


class AdapterTakeUp:
    """Loads adapters into one engine, and keeps track of them."""

    def __init__(self, engine: Engine, admin: EngineAdmin, tolerance: EngineTolerance, reloading: Reloading) -> None:
        self._engine = engine
        self._admin = admin
        self._tolerance = tolerance
        self._reloading = reloading
        self._key = reloading.leases.key(engine.url)
        self.present: dict[str, str] = {}  # the engine's models when it was last asked: name → folder
        self.served: dict[int, str] = {}  # adapters that this explorer has proven there: version → name
        self.leaving: dict[int, str] = {}  # adapters that get no more requests and will be unloaded
        self._loading: int | None = None

    def alone(self) -> AbstractAsyncContextManager[None]:
        """No exclusion: engines continue to serve while they load."""
        return nullcontext()

    def names(self, version: int) -> dict[int, str]:
        """Return what the engine serves, with the names: the base, and every proven adapter."""
        return {**self._reloading.named(0), **self.served}

    def note(self, connection: Connection) -> None:
        """Store the served and leaving adapters, in the transaction that announces them."""
        transitions.hold_adapters(connection, self._key, serves=self.served, leaving=self.leaving)

    def renew(self, connection: Connection) -> None:
        """Renew the leases on what the engine has. Nothing new is stored."""
        has = self._versions_present() | (set() if self._loading is None else {self._loading})
        transitions.renew_adapters(connection, self._key, has=has)

    async def stage(self, target: TargetVersion) -> TargetVersion:
        """Implements the protocol. The base, and adapters that the engine serves already, are not staged again."""
        if target.version == 0 or target.version in self.served:
            return target
        in_use = {*await self._read_in_use(), target.version}
        return await stage_target(self._admin, target, self._reloading, in_use)

    async def holds(self, target: TargetVersion) -> bool:
        await self.read_present()
        if target.version != 0:
            name = self._reloading.adapter_name(target.version, target.sha256)
            if not self.is_own(target.version, name):
                return False
        try:
            await self._prove(target)
        except EngineUnavailable:
            raise
        except EngineError as error:
            log.warning("engine does not prove the version it reports", engine=self._engine.name, reason=str(error))
            return False
        return True

    async def run(self, target: TargetVersion, good: TargetVersion | None) -> None:
        """Load and prove the target, besides what the engine serves.

        good: what it serves if this fails; it needs no action. Raises StageFailed if no engine with these settings
        could load the adapter; NoRoom, LoadUndone, ProbeMismatch, EngineDied, LedgerError.
        """
        try:
            await self._load(target)
        except EngineTimeout as error:
            raise LoadUndone(str(error), is_technical=True) from error
        except EngineUnavailable as error:
            raise EngineDied(str(error)) from error
        except EngineRefused as error:
            raise await self._explain(error) from error
        try:
            with self._reloading.metrics.reload_proof.time():
                await self._prove(target)
        except EngineUnavailable as error:
            raise EngineDied(str(error)) from error
        except ProbeMismatch:
            if target.version != 0:  # it has answered no request, unless it was proven before
                self.leave(target.version, self._reloading.adapter_name(target.version, target.sha256))
            raise

    async def _explain(self, error: EngineRefused) -> EngineError:
        """Return the error for a refused load: of the engine, of its settings, or of the adapter."""
        try:
            await self._admin.check_health()
        except EngineUnavailable as gone:  # the server's process may outlive the engine core
            return EngineDied(f"{error}; then {gone}")
        message = str(error)
        if "LoRA is not enabled" in message or (error.status in (404, 405) and '"error"' not in message):
            return StageFailed(
                f"the engine was started without LoRA ({message}); start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as `flywheel engine` does with model.kind: lora"
            )
        if "max_lora_rank" in message:
            return StageFailed(
                f"{message}; start the engine with the model.lora.rank that the adapter has, or a higher one"
            )
        if error.status == 404:
            return StageFailed(f"{message}; mount root_dir on the engine's machine as here, or set engine.staging_dir")
        if error.status == 400:
            return StageFailed(message)
        return LoadUndone(message, is_technical=False)

    @property
    def room(self) -> int:
        """How many more adapters fit in the engine's memory, so that it never has to read one again."""
        held = [name for name in self.present if name.startswith(f"{self._reloading.config.model.name}@")]
        return self._reloading.config.engine.versions_held - len(held)

    def inherited(self, version: int) -> bool:
        """Whether a previous owner loaded the version, and it is not leaving."""
        return version not in self.leaving and any(
            self._reloading.version_named(name) == version for name in self.present
        )

    def is_own(self, version: int, name: str) -> bool:
        """Whether the engine has this version under the name, not a foreign adapter."""
        return Path(self.present.get(name, "")).name.partition("-")[0] == version_name(version)

    async def read_present(self) -> None:
        """Read the engine's models; after a restart, its adapters are gone."""
        self.present = await self._admin.list_models()
        self.served = {version: name for version, name in self.served.items() if name in self.present}
        self.leaving = {version: name for version, name in self.leaving.items() if name in self.present}

    async def _read_in_use(self) -> set[int]:
        """Return the versions that the engine may read, also those that a previous owner loaded."""
        await self.read_present()
        leased = await self._reloading.fetch(lambda connection: queries.leased_versions(connection, self._key))
        return {*leased, *self._versions_present()}

    def _versions_present(self) -> set[int]:
        found = (self._reloading.version_named(name) for name in self.present)
        return {version for version in found if version is not None}

    def leave(self, version: int, name: str) -> None:
        """Send the version no new requests."""
        self.served.pop(version, None)
        self.leaving[version] = name

    async def unload(self, version: int) -> None:
        """Unload a leaving version. Raises EngineError."""
        await self._admin.unload_adapter(self.leaving[version])
        self.present.pop(self.leaving.pop(version), None)
        log.info("version out of service", version=version, engine=self._engine.name)

    async def _load(self, target: TargetVersion) -> None:
        await self.read_present()
        if target.version == 0:
            return
        name = self._reloading.adapter_name(target.version, target.sha256)
        if name not in self.present:
            if self.room < 1:
                raise NoRoom(
                    f"engine {self._admin.url} holds {self._reloading.config.engine.versions_held} versions, all of "
                    "which have requests; it is tried again, or raise engine.max_cpu_loras"
                )
            if not await self._reloading.writer.write(
                lambda c: transitions.expect_adapter(c, self._key, target.version)
            ):
                raise StageFailed(f"version {target.version} is not on disk any more")
            await self._reloading.leases.require_held(self._engine.url)
            self._loading = target.version
            try:
                await self._admin.load_adapter(name, target.folder)
            finally:
                self._loading = None
            self.present[name] = str(target.folder)
        elif not self.is_own(target.version, name):
            raise StageFailed(
                f"engine {self._admin.url} has another adapter under the name {name}, of {self.present[name]}; unload "
                "it there"
            )

    async def _prove(self, target: TargetVersion) -> None:
        """Prove the target under its name. Raises ProbeMismatch; NoRoom if a healthy engine has not answered.

        vLLM keeps a request waiting while requests of `max_loras` other adapters run, however long.
        """
        try:
            if target.version == 0:
                await self._tolerance.prove_started(self._admin, target)
                return
            name = self._reloading.adapter_name(target.version, target.sha256)
            await prove(self._admin, target.manifest.probe, await self._tolerance.bounds(target), name)
        except EngineTimeout as error:
            await self._admin.check_health()
            raise NoRoom(
                f"version {target.version} is not proven yet: {error}; requests of other versions may have all of its "
                "engine.max_loras slots; it is tried again, or raise engine.max_loras"
            ) from error
        except EngineRefused as error:
            raise StageFailed(f"{error}; the engine may have restarted") from error
        self.leaving.pop(target.version, None)
        self.served[target.version] = name
