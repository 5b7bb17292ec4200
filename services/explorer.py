"""`flywheel explorer`: builds the explorer and runs it under uvicorn."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from explorer_service.api.auth import Auth, doubtful_keys
from explorer_service.api.body import BodyReader
from explorer_service.api.connections import Connections, raise_descriptor_limit
from explorer_service.api.protocol import KEEP_ALIVE_S, ExplorerProtocol
from explorer_service.api.rules import HttpRules
from explorer_service.app import build_app
from explorer_service.background import Background
from explorer_service.deps import Deps
from explorer_service.engines.admin import EngineAdmin, open_client
from explorer_service.engines.dispatch import Dispatcher
from explorer_service.engines.http import EngineHttp
from explorer_service.engines.pool import EnginePool
from explorer_service.housekeeping import Housekeeper
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from explorer_service.metrics import ExplorerMetrics, MetricsText
from explorer_service.record import OpenStreams
from explorer_service.reload.controller import EngineController
from explorer_service.reload.lease import ReloadLease
from explorer_service.reload.ownership import EngineLeases
from explorer_service.reload.poller import VersionPoller
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.standstill import Standstill
from explorer_service.traffic.pins import Pins
from explorer_service.traffic.router import Router
from explorer_service.traffic.shares import Shares
from shared.belonging import require_belonging, require_kind
from shared.config import Config, ExplorerConfig, agreed_settings, is_loopback
from shared.engine_token import engine_token
from shared.errors import LedgerError, StartupError
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.log import StageLogger, configure_logging
from shared.ports import require_free_port
from shared.stop_request import StopRequest

log = StageLogger("explorer")
_GRACE_S = 10  # for open requests at the end
_WORKER_STOP_TIMEOUT_S = 15.0  # less than STOP_TIMEOUT_S, after which `flywheel up` kills the workers' supervisor
_BACKLOG = 2048  # uvicorn's default
_MEMORY = Path("/dev/shm")  # a file system in memory
_PROXIES = "127.0.0.1,::1,::ffff:127.0.0.1"  # of this machine, so believed; the last is the first at a socket of IPv6


def run_explorer(config: Config, file: Path, is_worker: bool = False) -> int:
    """Run until a signal. Returns the exit status.

    file: the configuration file. is_worker: this process is one of `explorer.workers`.
    """
    configure_logging("explorer", config.log_level)
    stop = StopRequest().listen()  # uvicorn raises the signal again after its shutdown: handled, so the status is 0
    explorer = config.explorer
    Auth(explorer)  # reports a missing key before anything starts
    if not is_worker:
        for doubt in doubtful_keys(explorer):
            log.warning(doubt)
        if sum(key.role == "feedback" for key in explorer.keys) > 1 and config.trainer.max_share_per_key == 1:
            log.warning("one feedback key may set all rewards of a batch; trainer.max_share_per_key bounds its share")
        require_free_port(explorer.host, explorer.port, "explorer.host or explorer.port")
    ledger = Ledger.open(config.ledger_url, answering_within(explorer.ledger_timeout_s))
    try:
        if not is_worker:
            require_belonging(config.root, ledger)
            require_kind(config.model.kind, ledger)
            _warn_of_engines_elsewhere(config, ledger)
        if explorer.workers > 1 and not is_worker:
            return _run_workers(config, file, stop)
        return _serve(config, ledger, stop)
    finally:
        ledger.close()


def _warn_of_engines_elsewhere(config: Config, ledger: Ledger) -> None:
    elsewhere = [engine.name for engine in config.explorer.engines if not is_loopback(engine.host)]
    if ledger.is_sqlite and elsewhere:
        log.warning(
            "the ledger is SQLite, which only processes of one machine may use; before an engine or a trainer of ours "
            "runs on another machine, set database_url (FLYWHEEL_DATABASE_URL) to a PostgreSQL database",
            engines=", ".join(elsewhere),
        )


def _run_workers(config: Config, file: Path, stop: StopRequest) -> int:
    """Run supervised processes that share the port."""
    from services.supervisor import Child, Supervisor

    # a worker that outlives its supervisor would hold the port, and ignore SIGTERM if it hangs
    children = [
        Child(f"worker-{number}", ["explorer", "-c", str(file), "--worker"], _WORKER_STOP_TIMEOUT_S, signal.SIGKILL)
        for number in range(config.explorer.workers)
    ]
    # in memory: on a full disk, a write to a mapped file ends the worker with SIGBUS
    memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) and _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="flywheel-metrics-", dir=memory) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read by the workers
        return Supervisor(children, stop).run()


def _serve(config: Config, ledger: Ledger, stop: StopRequest) -> int:
    explorer = config.explorer
    background = Background()
    server = build_server(build_app(partial(open_deps, config, ledger, background), explorer), explorer)
    _reduce_garbage_collection()
    with listen(explorer) as listener, server.capture_signals():  # before its event loop starts, too
        if stop:
            return 0
        host = f"[{explorer.host}]" if ":" in explorer.host else explorer.host
        log.info("listening", url=f"http://{host}:{explorer.port}", ledger=ledger.shown_url)
        server.run(sockets=[listener])
    if not server.started:
        raise StartupError("the explorer could not start; its log says why")
    if background.failed is not None:
        raise StartupError(f"{background.failed} died; the log above says why")
    return 0


def build_server(app: ASGIApp, explorer: ExplorerConfig) -> uvicorn.Server:
    """Build the server, to run on a socket from `listen`."""
    max_open = raise_descriptor_limit(explorer.max_connections)
    if max_open < explorer.max_connections:
        log.warning("fewer connections than explorer.max_connections: raise the limit of open files", allowed=max_open)
    protocol: Any = partial(ExplorerProtocol, connections=Connections(explorer, max_open))
    return uvicorn.Server(
        uvicorn.Config(
            HttpRules(app),
            log_level="error",  # a warning for each malformed request would flood the log
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            loop="uvloop",
            http=protocol,
            ws="none",
            proxy_headers=bool(explorer.open_feedback_from),  # only then a request's origin matters
            forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", _PROXIES),
        )
    )


def _reduce_garbage_collection() -> None:
    """Exclude existing objects from garbage collection, and collect rarely: chats create hardly any cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def listen(explorer: ExplorerConfig) -> socket.socket:
    """Open the socket; several workers have one each on the same port, and the kernel distributes the connections."""
    listener = socket.socket(socket.AF_INET6 if ":" in explorer.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if explorer.workers > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((explorer.host, explorer.port))
    except OSError as exc:
        listener.close()
        raise StartupError(
            f"cannot listen on {explorer.host}:{explorer.port} ({exc.strerror}); change explorer.host or explorer.port"
        ) from exc
    listener.listen(_BACKLOG)  # clients that connect during the start wait instead of being refused
    listener.setblocking(False)
    return listener


def _engine_pool(config: Config, metrics: ExplorerMetrics, poller: VersionPoller) -> EnginePool:
    explorer = config.explorer
    return EnginePool(
        explorer.engines,
        explorer.engine_wait_s,
        max_in_flight=explorer.max_in_flight,
        max_waiting=explorer.max_waiting,
        adapters=config.model.kind == "lora",
        wanted=lambda: poller.leading,
        note=lambda engine: metrics.note_engine(engine.name, engine.version, is_open=engine.is_open),
    )


@asynccontextmanager
async def open_deps(config: Config, ledger: Ledger, background: Background | None = None) -> AsyncIterator[Deps]:
    """Yield the dependencies of the handlers, with all side tasks running until the block ends."""
    explorer, metrics, background = config.explorer, ExplorerMetrics(), background or Background()
    async with AsyncExitStack() as stack:
        reader = LedgerReader(ledger, explorer.ledger_timeout_s)
        writer, feedback_writer = _start_writers(explorer, ledger, metrics, background)
        for stop in {reader.stop, writer.stop, feedback_writer.stop}:
            stack.push_async_callback(stop)
        poller = VersionPoller(ledger, explorer.reload.poll_interval_s)
        stack.push_async_callback(poller.stop)
        admin_http = await stack.enter_async_context(open_client())
        http = EngineHttp(explorer.request_timeout_s, explorer.max_reply_bytes)
        pool = _engine_pool(config, metrics, poller)
        membership = Membership(writer, agreed_settings(config))
        for stop in (http.close, membership.leave, background.stop_tasks):
            stack.push_async_callback(stop)
        leases = EngineLeases(ledger, writer, membership, explorer.engines)
        await poller.refresh()
        await _join(membership)
        reloading = Reloading(config, ledger, writer, pool, leases, poller, metrics, ReloadLease(writer, membership))
        health_checks = _start_controllers(reloading, membership, admin_http, background)
        housekeeper = Housekeeper(explorer, reader, feedback_writer, metrics, merges_counts=not ledger.is_sqlite)
        background.start_task("housekeeping", housekeeper.run())
        background.start_task("membership", membership.run())
        pins = None
        if reloading.loads_adapters:
            pins = Pins(pool, reader, writer, poller, membership.id, explorer.reload.unpin_after_s)
            background.start_task("pins", pins.run())
        yield Deps(
            config=config,
            reader=reader,
            writer=writer,
            feedback_writer=feedback_writer,
            membership=membership,
            leases=leases,
            open_streams=OpenStreams(reader, writer, membership),
            router=Router(config.model.name, engines=len(pool.engines)),
            shares=Shares(poller, reader),
            pool=pool,
            dispatcher=Dispatcher(pool, http, metrics, health_checks, pins.use if pins else None),
            auth=Auth(explorer),
            bodies=BodyReader(explorer),
            metrics=metrics,
            metrics_text=MetricsText(reader, metrics),
        )


def _start_controllers(
    reloading: Reloading, membership: Membership, http: httpx.AsyncClient, background: Background
) -> dict[str, Callable[[], Awaitable[None]]]:
    """Start a side task for each engine: it finds out what the engine serves, and loads new versions.

    Returns a health check for each engine, by its name.
    """
    config, pool = reloading.config, reloading.pool
    token, reload = _engine_token(config), config.explorer.reload
    background.start_task("version-poller", reloading.poller.run())
    background.start_task("standstill", Standstill(pool, membership, reloading.leases).run())
    health_checks: dict[str, Callable[[], Awaitable[None]]] = {}
    for engine in pool.engines:
        admin = EngineAdmin(http, engine.url, config.model.name, reload.answer_timeout_s, token, reload.timeout_s)
        controller = EngineController(engine, admin, reloading)
        background.start_task(f"engine-controller-{engine.name}", controller.run())
        health_checks[engine.name] = admin.check_health
    return health_checks


def _engine_token(config: Config) -> str | None:
    """Return the token for engines; None: it cannot be read, and engines that need it will refuse."""
    try:
        return engine_token(config)
    except StartupError as error:
        log.warning("engines of `flywheel engine` will refuse to be reloaded", reason=str(error))
        return None


def _start_writers(
    explorer: ExplorerConfig, ledger: Ledger, metrics: ExplorerMetrics, background: Background
) -> tuple[LedgerWriter, LedgerWriter]:
    """Start the writer, and the one for feedback and commits; see decision 4."""
    writer = LedgerWriter(ledger, metrics, background, explorer.ledger_timeout_s)
    if ledger.is_sqlite:
        return writer, writer
    return writer, LedgerWriter(ledger, metrics, background, explorer.ledger_timeout_s, "feedback-writer")


async def _join(membership: Membership) -> None:
    """Register with the other explorers before the first engine request: a reload waits for all known explorers."""
    try:
        await membership.heartbeat()
    except LedgerError as error:
        log.warning("the ledger is unavailable; chats answer 503 until it is back", reason=str(error))
