"""Everything a request handler may touch, in one object."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from explorer_service.auth import Auth
from explorer_service.engines.connection import Connections
from explorer_service.engines.pool import EnginePool
from explorer_service.fleet import Fleet
from explorer_service.record import Recorder
from explorer_service.router import Router
from explorer_service.watch import VersionWatch
from shared.config import Config
from shared.ledger.connect import Ledger
from shared.metrics import ExplorerMetrics


class InFlight:
    """Message ids that callers know already (a stream's first chunk names it) though their rows do not stand yet."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def begin(self, msg_id: str) -> None:
        self._events[msg_id] = asyncio.Event()

    def end(self, msg_id: str) -> None:
        """The row stands, or never will."""
        self._events.pop(msg_id).set()

    async def wait(self, msg_ids: list[str]) -> None:
        """Until none of these is in flight."""
        for name in msg_ids:
            event = self._events.get(name.partition("#")[0])
            if event is not None:
                await event.wait()


@dataclass(frozen=True, slots=True)
class Deps:
    """Built once by services/explorer.py; handed to every handler."""

    config: Config
    ledger: Ledger
    recorder: Recorder
    pool: EnginePool
    router: Router
    auth: Auth
    metrics: ExplorerMetrics
    connections: Connections  # chats to engines
    session: aiohttp.ClientSession  # engines' administration
    fleet: Fleet
    versions: VersionWatch
    started_at: float = field(default_factory=time.time)  # Unix seconds
    in_flight: InFlight = field(default_factory=InFlight)
