"""What the controllers of a process share."""

from __future__ import annotations

import asyncio
import re
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
from shared.config import Config
from shared.experience import Purpose
from shared.ledger import transitions
from shared.ledger.connect import Ledger

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reloading:
    """Built once by services/explorer.py; handed to every controller."""

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
        """Whether engines load adapters beside one another; otherwise all their weights are replaced."""
        return self.config.model.kind == "lora"

    async def fetch(self, query: Callable[[Connection], T]) -> T:
        """What a query of the ledger finds. Raises LedgerError."""
        return await asyncio.to_thread(self.ledger.fetch, query)

    async def lease_files(self, engine: str, version: int) -> None:
        """An engine is about to read a version's files: they stay until it is said to serve. engine: as leases name it.

        Raises StageFailed when the files are given up, LedgerError.
        """
        owner, purpose = self.leases.explorer, Purpose.LOADING

        def lease(connection: Connection) -> bool:
            return transitions.lease_version(connection, version, reader=engine, purpose=purpose, owner=owner)

        if not await self.writer.write(lease):
            raise StageFailed(f"version {version} is not on disk any more")

    def adapter_name(self, version: int, manifest_sha256: str | None) -> str:
        """The name by which engines know an adapter, such as `agent@12+9f86d081`: no other one ever has it.

        vLLM caches KV by the name, and keeps what it computed under it for ever.
        """
        return f"{self.config.model.name}@{version}+{(manifest_sha256 or '')[:8]}"

    def version_named(self, name: str) -> int | None:
        """The version of such a name; None for any other."""
        found = re.fullmatch(re.escape(self.config.model.name) + r"@(\d{1,9})\+[0-9a-f]{0,8}", name)
        return None if found is None else int(found[1])

    def named(self, version: int) -> dict[int, str]:
        """What an engine serves by all of its weights: one version, under the configured name."""
        return {version: self.config.model.name}
