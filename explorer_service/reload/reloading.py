"""The objects that all controllers of a process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection

from explorer_service.engines.pool import EnginePool
from explorer_service.errors import StageFailed
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.metrics import ExplorerMetrics
from explorer_service.reload.lease import ReloadLease
from explorer_service.reload.ownership import EngineLeases
from explorer_service.reload.poller import VersionPoller
from shared.adapters import adapter_name, adapter_version
from shared.config import Config
from shared.experience import Purpose
from shared.ledger import transitions
from shared.ledger.connect import Ledger

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reloading:
    """Built once by services/explorer.py; passed to every controller."""

    config: Config
    ledger: Ledger
    writer: LedgerWriter
    pool: EnginePool
    leases: EngineLeases
    poller: VersionPoller
    metrics: ExplorerMetrics
    reload_lease: ReloadLease

    @property
    def loads_adapters(self) -> bool:
        """Whether engines load several adapters; otherwise all their weights are replaced."""
        return self.config.model.kind == "lora"

    async def fetch(self, query: Callable[[Connection], T]) -> T:
        """Run a query on the ledger. Raises LedgerError."""
        return await asyncio.to_thread(self.ledger.fetch, query)

    async def lease_files(self, engine: str, version: int) -> None:
        """Keep a version's files, which an engine will read, until it is announced to serve.

        engine: its name in the ledger. Raises StageFailed if the files are or will be deleted, LedgerError.
        """
        owner, purpose = self.leases.explorer, Purpose.LOADING

        def lease(connection: Connection) -> bool:
            return transitions.lease_version(connection, version, reader=engine, purpose=purpose, owner=owner)

        if not await self.writer.write(lease):
            raise StageFailed(f"version {version} is not on disk any more")

    def adapter_name(self, version: int, manifest_sha256: str | None) -> str:
        """Return an adapter's name at engines, such as `agent@12+9f86d081`. It is never used for another one."""
        return adapter_name(self.config.model.name, version, manifest_sha256)

    def version_named(self, name: str) -> int | None:
        """Return the version of such a name; None for other names."""
        return adapter_version(self.config.model.name, name)

    def named(self, version: int) -> dict[int, str]:
        """Return what an engine with a full version serves: this version, under the configured name."""
        return {version: self.config.model.name}
