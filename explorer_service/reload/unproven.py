"""What an engine serves if no version may serve: nothing, or its first weights if none was ever published."""

from __future__ import annotations

import asyncio

from explorer_service.engines.admin import EngineAdmin
from explorer_service.engines.engine import Engine, EngineState
from explorer_service.reload.probe import read_defaults_before
from explorer_service.reload.reloading import Reloading
from shared.ledger.queries import any_published
from shared.log import StageLogger

log = StageLogger("reload")

NONE_MAY_SERVE = (
    "there are versions, and none may serve; publish one, or have a FAILED one tried again with flywheel versions retry"
)


async def serve_unproven(engine: Engine, admin: EngineAdmin, names: dict[int, str], reloading: Reloading) -> None:
    """Close the engine: no version may serve. Before any was published, serve its first weights as version 0.

    names: of what it serves with version 0. Raises EngineError, LedgerError, VersionError.
    """
    leases, pool = reloading.leases, reloading.pool
    if await reloading.fetch(any_published):
        if engine.reason == NONE_MAY_SERVE:
            return
        await reloading.poller.refresh()
        if reloading.poller.wanted() is None:  # otherwise one was published since the poller's last query
            log.error("no version may serve", engine=engine.name, reason=NONE_MAY_SERVE)
            await leases.announce(engine.url, EngineState.CHECKING, None)
            pool.check(engine, NONE_MAY_SERVE)
    elif engine.state is not EngineState.SERVING:
        await admin.resume()
        defaults = await asyncio.to_thread(read_defaults_before, reloading.config.model.path)
        await leases.announce(engine.url, EngineState.SERVING, 0)
        pool.serve(engine, names, defaults, version=0)
