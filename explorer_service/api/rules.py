"""HTTP rules for the requests and responses of all routes: the outermost layer of the application.

A request needs one Host header and a supported version of HTTP. A caller of HTTP/1.0, which has no chunks, gets a
stream as a whole response with its length.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from explorer_service.api.errors import ApiError, bad_request


class HttpRules:
    """Middleware that applies the rules to another ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if is_http and (error := _check(scope)) is not None:
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, _Whole(send) if is_http and scope["http_version"] == "1.0" else send)


def _check(scope: Scope) -> ApiError | None:
    version = scope["http_version"]
    if version not in ("1.1", "1.0"):
        return ApiError(505, f"HTTP/{version} is not supported; use HTTP/1.1", code="http_version_not_supported")
    hosts = [name for name, _ in scope["headers"]].count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        return bad_request(f"the request has {hosts} Host headers; send one")
    return None


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection: the sender may see other request boundaries than this server."""
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


class _Whole:
    """Buffers a response without a length, and sends it with its length once it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: dict[str, Any] = {}
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not any(n == b"content-length" for n, _ in message["headers"]):
            self._start = dict(message)
        elif not self._start:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                length = (b"content-length", b"%d" % len(self._body))
                await self._send({**self._start, "headers": [*self._start["headers"], length]})
                await self._send({**message, "body": bytes(self._body)})
