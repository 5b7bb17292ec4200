"""HTTP rules for the requests and responses of all routes: the outermost layer of the application.

A request needs one Host header and a supported version of HTTP. A caller of HTTP/1.0, which has no chunks, gets a
stream as a whole response with its length. A response that ends its connection waits for the whole request.
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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error := _check(scope)) is not None:
            await _refuse(error, scope, receive, send)
            return
        is_old = scope["http_version"] == "1.0"
        if is_old or _ends_connection(scope):
            body = _Body(scope, receive, send)
            receive, send = body.receive, body.send
        await self._app(scope, receive, _Whole(send) if is_old else send)


def _check(scope: Scope) -> ApiError | None:
    version = scope["http_version"]
    if version not in ("1.1", "1.0"):
        return ApiError(505, f"HTTP/{version} is not supported; use HTTP/1.1", code="http_version_not_supported")
    hosts = [name for name, _ in scope["headers"]].count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        return bad_request(f"the request has {hosts} Host headers; send one")
    return None


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for field, value in scope["headers"] if field == name), b"")


def _ends_connection(scope: Scope) -> bool:
    """Whether `close` is among the options of the connection, such as in `Connection: TE, close`."""
    options = (one for name, value in scope["headers"] if name == b"connection" for one in value.lower().split(b","))
    return any(one.strip() == b"close" for one in options)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection: the sender may see other request boundaries than this server."""
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


class _Body:
    """Reads the rest of a request's body before a response that ends the connection.

    Closing a connection with unread bytes resets it, and a caller that is still sending could not read the response. A
    caller that sent `Expect: 100-continue` sends no body until the application reads it. The usual limit of a body's
    time applies.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_sent = not _header(scope, b"expect")
        self._is_read = False

    async def receive(self) -> Message:
        self._is_sent = True
        message = await self._receive()
        self._is_read = not message.get("more_body", False)  # also when the caller has disconnected
        return message

    async def send(self, message: Message) -> None:
        while self._is_sent and not self._is_read:
            await self.receive()
        await self._send(message)


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
