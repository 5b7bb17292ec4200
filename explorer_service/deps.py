"""Everything that request handlers use, in one object."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from explorer_service.api.auth import Auth
from explorer_service.api.body import BodyReader
from explorer_service.engines.dispatch import Dispatcher
from explorer_service.engines.pool import EnginePool
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from explorer_service.metrics import ExplorerMetrics, MetricsText
from explorer_service.record import OpenStreams
from explorer_service.reload.ownership import EngineLeases
from explorer_service.traffic.router import Router
from explorer_service.traffic.shares import Shares
from shared.config import Config


@dataclass(frozen=True, slots=True)
class Deps:
    """Built once by services/explorer.py; passed to every handler."""

    config: Config
    reader: LedgerReader
    writer: LedgerWriter
    feedback_writer: LedgerWriter  # for changes to rows that other sessions may have locked
    membership: Membership
    leases: EngineLeases
    open_streams: OpenStreams
    router: Router
    shares: Shares
    pool: EnginePool
    dispatcher: Dispatcher
    auth: Auth
    bodies: BodyReader
    metrics: ExplorerMetrics
    metrics_text: MetricsText
    started_at: float = field(default_factory=time.time)  # Unix seconds
