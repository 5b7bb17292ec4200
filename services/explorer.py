"""`flywheel explorer`: builds the explorer and runs it under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from explorer_service.app import build_app
from explorer_service.auth import Auth
from explorer_service.deps import Deps
from explorer_service.door import Door
from explorer_service.engines.client import open_session
from explorer_service.engines.connection import Connections
from explorer_service.engines.pool import EnginePool
from explorer_service.fleet import Fleet
from explorer_service.record import Recorder
from explorer_service.router import Router
from explorer_service.watch import VersionWatch
from shared.config import Config, ExplorerConfig
from shared.errors import StartupError
from shared.ledger.connect import Ledger
from shared.lifecycle import StopRequest, require_free_port, until_next
from shared.log import StageLogger, configure_logging
from shared.metrics import ExplorerMetrics

log = StageLogger("explorer")


def run_explorer(config: Config, file: Path, is_worker: bool = False) -> int:
    """Run until a signal. Returns the exit status.

    file: where the configuration came from. is_worker: this process is one of `explorer.workers`.
    """
    configure_logging("explorer", config.log_level)
    StopRequest().listen()  # uvicorn raises the signal again after its own orderly end: taken here, so we end with 0
    explorer = config.explorer
    Auth(explorer)  # a key that is not set must be said before anything starts
    if not is_worker:
        require_free_port(explorer.host, explorer.port, "explorer.port")
    ledger = Ledger.open(config.ledger_url)
    try:
        if explorer.workers > 1 and not is_worker:
            return _run_workers(config, file)
        return _serve(config, ledger)
    finally:
        ledger.close()


def _run_workers(config: Config, file: Path) -> int:
    """Processes that share the port, supervised."""
    from services.local import Child, Supervisor

    children = [
        Child(f"worker-{number}", ["explorer", "-c", str(file), "--worker"])
        for number in range(config.explorer.workers)
    ]
    with tempfile.TemporaryDirectory(prefix="flywheel-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read by the workers
        return Supervisor(children, StopRequest().listen()).run()


def _serve(config: Config, ledger: Ledger) -> int:
    explorer = config.explorer
    app = build_app(*make_deps_factory(config, ledger))
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=75,  # longer than clients keep idle connections: theirs close first, and none in use
            loop="uvloop",
            http=Door,
            proxy_headers=bool(explorer.open_feedback_from),  # only then it matters where a request comes from
        )
    )
    _collect_seldom()
    with _listen(explorer) as listener:
        log.info("listening", url=f"http://{explorer.host}:{explorer.port}", ledger=ledger.shown_url)
        server.run(sockets=[listener])
    if not server.started:
        raise StartupError("the explorer could not start; its log says why")
    return 0


def _collect_seldom() -> None:
    """Leave what stands at the start out of every collection, and collect seldom: chats leave hardly any cycles.

    Of a slow stream's CPU time this takes a tenth away (benchmarks/front_door.py); memory stays flat (--soak).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class _Server(uvicorn.Server):
    """uvicorn's, but awake once a second and when told to end, not ten times: an idle explorer is nearly free."""

    TICK_S = 1.0
    _wake: Callable[[], object] | None = None

    async def main_loop(self) -> None:
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = partial(loop.call_soon_threadsafe, told.set)
        while not await self.on_tick(0):  # renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_next(self.TICK_S)):
                    await told.wait()
        self._wake = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._wake is not None:
            self._wake()


def _listen(explorer: ExplorerConfig) -> socket.socket:
    """The socket; several workers each have one on the same port, and the kernel spreads the connections."""
    listener = socket.socket(socket.AF_INET6 if ":" in explorer.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if explorer.workers > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((explorer.host, explorer.port))
    except OSError as exc:
        listener.close()
        raise StartupError(
            f"cannot listen on {explorer.host}:{explorer.port} ({exc.strerror}); change explorer.port"
        ) from exc
    listener.setblocking(False)
    return listener


def make_deps_factory(
    config: Config, ledger: Ledger
) -> tuple[Callable[[], Awaitable[Deps]], Callable[[Deps], Awaitable[None]]]:
    """How the app builds and closes what its handlers need, inside its event loop."""
    explorer = config.explorer

    async def make_deps() -> Deps:
        metrics = ExplorerMetrics()
        recorder = Recorder(ledger, metrics)
        recorder.start()
        versions = VersionWatch(ledger, explorer.reload.poll_interval_s)
        await versions.start()
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
            router=Router(config.model.name),
            auth=Auth(explorer),
            metrics=metrics,
            connections=Connections(explorer.request_timeout_s),
            session=open_session(),
            fleet=Fleet(ledger, recorder),
            versions=versions,
        )

    async def close_deps(deps: Deps) -> None:
        deps.connections.close()
        await deps.session.close()
        await deps.versions.stop()
        await deps.recorder.stop()

    return make_deps, close_deps
