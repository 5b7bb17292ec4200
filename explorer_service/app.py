"""The explorer's HTTP application: all routes in one table, and the only place that answers exceptions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from explorer_service.api.browsers import BrowserGuard
from explorer_service.api.errors import ApiError, as_api_error, internal_error
from explorer_service.chat.passthrough import answer_unrecorded
from explorer_service.chat.plain import answer_chat, answer_completion
from explorer_service.commit import answer_commit
from explorer_service.deps import Deps
from explorer_service.errors import CallerLeft
from explorer_service.feedback import answer_feedback
from explorer_service.operate import answer_promote, answer_rollback, answer_traffic
from explorer_service.runs import answer_runs
from explorer_service.status import (
    answer_health,
    answer_metrics,
    answer_model,
    answer_models,
    answer_ready,
    answer_status,
    answer_versions,
)
from shared.config import ExplorerConfig
from shared.log import StageLogger

log = StageLogger("explorer")
Handler = Callable[[Request, Deps], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", answer_chat),
    ("POST", "/chat", answer_chat),
    ("POST", "/v1/completions", answer_completion),
    ("POST", "/run/{task}/{run}/v1/chat/completions", answer_chat),
    ("POST", "/run/{task}/{run}/chat", answer_chat),
    ("POST", "/run/{task}/{run}/v1/completions", answer_completion),
    ("POST", "/feedback", answer_feedback),
    ("POST", "/commit", answer_commit),
    ("POST", "/v1/responses", answer_unrecorded),
    ("POST", "/v1/messages", answer_unrecorded),
    ("POST", "/tokenize", answer_unrecorded),
    ("POST", "/detokenize", answer_unrecorded),
    ("GET", "/v1/models", answer_models),
    ("GET", "/v1/models/{model:path}", answer_model),
    ("GET", "/run/{task}/{run}/v1/models", answer_models),
    ("GET", "/run/{task}/{run}/v1/models/{model:path}", answer_model),
    ("GET", "/health", answer_health),
    ("GET", "/ready", answer_ready),
    ("GET", "/metrics", answer_metrics),
    ("GET", "/runs", answer_runs),
    ("GET", "/versions", answer_versions),
    ("GET", "/status", answer_status),
    ("PUT", "/traffic", answer_traffic),
    ("POST", "/versions/{version}/promote", answer_promote),
    ("POST", "/rollback", answer_rollback),
)
_COUNTED = (answer_chat, answer_completion)  # included in the metrics of chat
_CALLER_LEFT = 499
_OPENAI_PATHS = ("/completions", "/models", "/responses")  # ends of those that clients append to the base URL


class ExplorerApp(FastAPI):
    """FastAPI without its error handlers and exit stack: `Endpoint` handles the exceptions of all routes."""

    def build_middleware_stack(self) -> ASGIApp:
        """Build the stack from the routes and the middleware of `add_middleware` only."""
        app: ASGIApp = self.router
        for middleware in reversed(self.user_middleware):
            app = middleware.cls(app, *middleware.args, **middleware.kwargs)
        return app


def build_app(open_deps: Callable[[], AbstractAsyncContextManager[Deps]], config: ExplorerConfig) -> FastAPI:
    """Build the application. open_deps: opens what handlers need, until the application ends."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Deps]]:
        async with open_deps() as deps:
            yield {"deps": deps}

    app = ExplorerApp(title="Flywheel Explorer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a redirect would contain the Host that the caller sent
    app.router.default = _answer_not_found
    app.router.routes += [_RawRoute(path, Endpoint(handler), methods=[method]) for method, path, handler in ROUTES]
    if not config.keys:  # otherwise pages are harmless: they know no key, and browsers do not add one
        app.add_middleware(BrowserGuard, allowed_hosts=config.allowed_hosts)
    return app


class _RawRoute(Route):
    """A route that matches the undecoded path, so that its parameters may contain a percent-encoded slash."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if "{" not in self.path:  # Starlette's pattern would also match a path that ends with a line feed
            return super().matches(scope) if scope["path"] == self.path else (Match.NONE, {})
        return super().matches({**scope, "path": scope.get("raw_path", b"").decode("latin-1")})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = self.methods or set()
        if scope["method"] in allowed:
            await self.app(scope, receive, send)
            return
        refusal = ApiError(405, "Method Not Allowed").response()
        refusal.headers["Allow"] = ", ".join(sorted(allowed))
        await refusal(scope, receive, send)


async def _answer_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    message = "Not Found"
    if scope["path"].endswith(_OPENAI_PATHS) and "/v1/" not in scope["path"]:
        message = "Not Found: the base URL of an OpenAI client ends in /v1"
    await ApiError(404, message, kind="NotFoundError").response()(scope, receive, send)


class Endpoint:
    """A handler as an ASGI application. Only this class converts its exceptions to answers."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps: Deps = scope["state"]["deps"]
        started, status = time.perf_counter(), 500
        try:
            response = await self._answer(Request(scope, receive, send), deps)
            await response(scope, receive, send)
            status = response.status_code
        except CallerLeft:
            status = _CALLER_LEFT  # no answer can be sent
        finally:
            if self._handler in _COUNTED:
                deps.metrics.count_answer(status, time.perf_counter() - started)

    async def _answer(self, request: Request, deps: Deps) -> Response:
        try:
            return await self._handler(request, deps)
        except CallerLeft:
            raise
        except Exception as error:  # the boundary of a request
            answer = as_api_error(error)
            if answer is None:
                log.exception("a request failed for a reason of ours", path=request.scope["path"])
                answer = internal_error()
            return answer.response()
