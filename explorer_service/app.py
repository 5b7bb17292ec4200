"""The explorer's HTTP surface but for what goes to engines (door.py), and every failure in OpenAI's shape."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.commit import answer_commit
from explorer_service.deps import Deps
from explorer_service.door import ENGINE_ROUTES
from explorer_service.engines.client import EngineClient
from explorer_service.errors import ApiError, our_fault
from explorer_service.feedback import answer_feedback
from explorer_service.housekeeping import Housekeeper
from explorer_service.reload import EngineKeeper
from explorer_service.status import (
    answer_health,
    answer_metrics,
    answer_models,
    answer_ready,
    answer_status,
    answer_versions,
)
from shared.errors import LedgerError
from shared.log import StageLogger

log = StageLogger("explorer")
Handler = Callable[[Request, Deps], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/feedback", answer_feedback),
    ("POST", "/commit", answer_commit),
    ("GET", "/v1/models", answer_models),
    ("GET", "/health", answer_health),
    ("GET", "/ready", answer_ready),
    ("GET", "/metrics", answer_metrics),
    ("GET", "/versions", answer_versions),
    ("GET", "/status", answer_status),
)
NOT_YET: tuple[tuple[str, str], ...] = (
    ("PUT", "/traffic"),
    ("POST", "/versions/{version}/promote"),
    ("POST", "/rollback"),
)


def build_app(make_deps: Callable[[], Awaitable[Deps]], close_deps: Callable[[Deps], Awaitable[None]]) -> FastAPI:
    """The application. Its lifespan builds the dependencies and keeps the engines; a dead keeper stops the process."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Deps]]:
        deps = await make_deps()
        app.state.deps = deps
        await _first_beat(deps)
        keepers = [asyncio.create_task(keeper.run(), name=name) for name, keeper in _keepers(deps)]
        keeping_house = Housekeeper(deps.config.explorer, deps.recorder).run()
        keepers.append(asyncio.create_task(keeping_house, name="housekeeping"))
        keepers.append(asyncio.create_task(deps.fleet.run(), name="fleet"))
        for task in keepers:
            task.add_done_callback(_stop_if_dead)
        try:
            yield {"deps": deps}
        finally:
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await deps.fleet.leave()
            await close_deps(deps)

    app = FastAPI(title="Flywheel Explorer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for method, path, handler in ROUTES:
        app.add_route(path, partial(_handle, handler), methods=[method])
    for engine_path in ENGINE_ROUTES:  # so that any other method is told which one is right
        app.add_route(engine_path.decode(), _answer_at_the_door, methods=["POST"])
    for method, path in NOT_YET:
        app.add_route(path, partial(_handle, _answer_not_yet), methods=[method])
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _handle(handler: Handler, request: Request) -> Response:
    try:
        return await handler(request, request.app.state.deps)
    except ApiError as error:
        return error.response()


async def _answer_at_the_door(_request: Request) -> Response:
    raise RuntimeError("what goes to engines is answered by explorer_service.door: uvicorn must run with http=Door")


async def _first_beat(deps: Deps) -> None:
    """Be known to the others before the first look at an engine: who reloads one asks everybody it knows."""
    try:
        await deps.fleet.beat()
    except LedgerError as error:
        log.warning("the ledger is away; chats answer 503 until it is back", reason=str(error))


async def _answer_not_yet(request: Request, deps: Deps) -> Response:
    deps.auth.require(request, "admin")
    raise ApiError(
        501, "traffic, promotion and rollback are not built yet", kind="not_implemented", code="not_implemented"
    )


async def _on_http_exception(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    kind = "NotFoundError" if exc.status_code == 404 else "invalid_request_error"
    response = ApiError(exc.status_code, str(exc.detail), kind=kind).response()
    response.headers.update(exc.headers or {})
    return response


async def _on_bug(request: Request, exc: Exception) -> Response:
    log.error("a request failed for a reason of ours", path=request.url.path, error=repr(exc))
    return our_fault().response()


def _keepers(deps: Deps) -> list[tuple[str, EngineKeeper]]:
    lock = asyncio.Lock()  # with several engines, one reloads while the others serve
    config = deps.config
    return [
        (
            f"keeper-{engine.name}",
            EngineKeeper(
                engine,
                EngineClient(deps.session, engine.url, config.model.name, config.explorer.reload.timeout_s),
                deps.pool,
                config,
                deps.ledger,
                deps.recorder,
                deps.metrics,
                deps.fleet,
                deps.versions,
                lock,
            ),
        )
        for engine in deps.pool.engines
    ]


def _stop_if_dead(task: asyncio.Task[None]) -> None:
    """A keeper never ends by itself; if one does, the explorer must not go on half-blind."""
    if not task.cancelled():
        error = task.exception()
        log.error("a side task died; the explorer stops", task=task.get_name(), error=repr(error))
        signal.raise_signal(signal.SIGTERM)
