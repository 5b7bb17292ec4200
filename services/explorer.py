"""`flywheel explorer`: builds the explorer and runs it under uvicorn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import uvicorn

from explorer_service.app import build_app
from explorer_service.auth import Auth
from explorer_service.deps import Deps
from explorer_service.engines.client import open_session
from explorer_service.engines.pool import EnginePool
from explorer_service.fleet import Fleet
from explorer_service.record import Recorder
from explorer_service.router import Router
from shared.config import Config
from shared.errors import StartupError
from shared.ledger.connect import Ledger
from shared.lifecycle import StopRequest, require_free_port
from shared.log import StageLogger, configure_logging
from shared.metrics import ExplorerMetrics

log = StageLogger("explorer")


def run_explorer(config: Config) -> int:
    """Run until a signal. Returns the exit status."""
    configure_logging("explorer", config.log_level)
    StopRequest().listen()  # uvicorn raises the signal again after its own orderly end: taken here, so we end with 0
    explorer = config.explorer
    Auth(explorer)  # a key that is not set must be said before anything starts
    require_free_port(explorer.host, explorer.port, "explorer.port")
    ledger = Ledger.open(config.ledger_url)

    app = build_app(*make_deps_factory(config, ledger))
    log.info("listening", url=f"http://{explorer.host}:{explorer.port}", ledger=ledger.shown_url)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=explorer.host,
            port=explorer.port,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=75,  # longer than clients keep idle connections: theirs close first, and none in use
            loop="uvloop",
            http="httptools",
        )
    )
    try:
        server.run()
    finally:
        ledger.close()
    if not server.started:
        raise StartupError(f"the explorer could not listen on {explorer.host}:{explorer.port}; its log says why")
    return 0


def make_deps_factory(
    config: Config, ledger: Ledger
) -> tuple[Callable[[], Awaitable[Deps]], Callable[[Deps], Awaitable[None]]]:
    """How the app builds and closes what its handlers need, inside its event loop."""
    explorer = config.explorer

    async def make_deps() -> Deps:
        metrics = ExplorerMetrics()
        recorder = Recorder(ledger, metrics)
        recorder.start()
        pool = EnginePool(
            explorer.engines,
            explorer.engine_wait_s,
            max_in_flight=explorer.max_in_flight,
            max_waiting=explorer.max_waiting,
        )
        return Deps(
            config=config,
            ledger=ledger,
            recorder=recorder,
            pool=pool,
            router=Router(config.model.name, pool),
            auth=Auth(explorer),
            metrics=metrics,
            session=open_session(explorer.request_timeout_s),
            fleet=Fleet(ledger, recorder),
        )

    async def close_deps(deps: Deps) -> None:
        await deps.session.close()
        await deps.recorder.stop()

    return make_deps, close_deps
