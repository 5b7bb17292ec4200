"""An ASGI middleware that vLLM's server loads: closed until the engine is warm, then restricted for strangers.

The first requests to a fresh engine compile kernels. Until the warm-up ends, every route answers 503 to all callers but
the warm-up itself, so that no health check finds the engine ready too early. The gate closes again when the engine
stops; requests that have passed it end. While it is open, every client except a web page may sample, and read the
routes in OPEN_ROUTES. Any other route of vLLM, in this or a later release, may change the engine or reveal data about
its machine: it requires the token of the explorers. RESTART_PATH, STAGE_PATH and IDENTITY_PATH are our own; the process
that started vLLM serves the second one on a socket, see stage.py. The third one answers the engine's own name, by which
explorers notice that they name it by different urls. This file imports none of our modules, because it runs inside
vLLM's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import psutil

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# no FLYWHEEL_ prefix, which would make them settings
WARMUP_VARIABLE = "ENGINE_WARMUP_TOKEN"
ADMIN_VARIABLE = "ENGINE_ADMIN_TOKEN"
STAGE_VARIABLE = "ENGINE_STAGE_SOCKET"
IDENTITY_VARIABLE = "ENGINE_IDENTITY"
WARMUP_HEADER = "x-flywheel-warmup"
ADMIN_HEADER = "x-flywheel-engine-token"
OPEN_PATH, CLOSE_PATH = "/flywheel/open", "/flywheel/close"
STAGE_PATH = "/flywheel/stage"
STAGE_BODY_BYTES = 16_384
RESTART_PATH = "/flywheel/restart"  # the same as in explorer_service/engines/admin.py
IDENTITY_PATH = "/flywheel/identity"  # likewise
OPEN_ROUTES = frozenset((
    ("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
))  # fmt: skip


class EngineGate:
    """Closed until a caller with the warm-up's token requests OPEN_PATH, and after CLOSE_PATH: it answers 503.

    While it is open, it answers 403 to strangers. CLOSE_PATH is answered when no request is in flight. Until then,
    explorers still end their reloads, but find the engine unhealthy.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._warmup = os.environ.get(WARMUP_VARIABLE, "").encode()
        self._admin = os.environ.get(ADMIN_VARIABLE, "").encode()
        self._stage_socket = os.environ.get(STAGE_VARIABLE, "")
        self._identity = os.environ.get(IDENTITY_VARIABLE, "")
        self._open = not self._warmup
        self._is_stopping = False
        self._in_flight, self._idle = 0, asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._call(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # none of our clients uses it, but browsers may
        else:
            await self._app(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, route = scope["headers"], (scope["method"], scope["path"])
        if self._open:
            await self._call_open(scope, receive, send)
        elif _has_token(headers, WARMUP_HEADER, self._warmup):
            if scope["path"] != OPEN_PATH:
                await self._app(scope, receive, send)
                return
            self._open = True
            await _answer(send, 200, b"{}")
        elif self._is_stopping and route != ("GET", "/health") and _has_token(headers, ADMIN_HEADER, self._admin):
            await self._command(scope, receive, send)  # a reload ends, so that what it paused is answered
        else:
            await _refuse(send, 503, "the engine is warming up or stopping; try again soon")

    async def _call_open(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        if scope["path"] == CLOSE_PATH and _has_token(headers, WARMUP_HEADER, self._warmup):
            self._open, self._is_stopping = False, True
            await self._idle.wait()
            await _answer(send, 200, b"{}")
        elif _has_token(headers, ADMIN_HEADER, self._admin):
            await self._command(scope, receive, send)
        elif (scope["method"], scope["path"]) not in OPEN_ROUTES:
            await _refuse(send, 403, "this route needs the engine's token; set engine.admin_token for the explorer")
        elif any(name == b"origin" for name, _ in headers):
            await _refuse(send, 403, "a web page may not use the engine")
        else:
            await self._serve(scope, receive, send)

    async def _command(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an explorer, which has the token."""
        route = scope["method"], scope["path"]
        kinds = [value for name, value in scope["headers"] if name == b"content-type"]
        if not all(kind.startswith(b"application/json") for kind in kinds):
            await _refuse(send, 415, "the body must be JSON; send the header Content-Type: application/json")
        elif route == ("POST", STAGE_PATH):
            await self._stage(receive, send)
        elif route == ("POST", RESTART_PATH):
            _end_vllm()
        elif route == ("GET", IDENTITY_PATH):
            await _answer(send, 200, b'{"identity":"%s"}' % self._identity.encode())
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that the end of the engine waits for."""
        self._in_flight += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _stage(self, receive: Receive, send: Send) -> None:
        """Forward the request to the staging process, and return its answer."""
        body, more = b"", True
        while more and len(body) <= STAGE_BODY_BYTES:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if more or len(body) > STAGE_BODY_BYTES:
            await _refuse(send, 413, "the body is too large")
        elif not self._stage_socket:
            await _refuse(send, 404, "this engine stages no versions; set engine.staging_dir")
        else:
            try:
                status, _, answer = (await _ask(self._stage_socket, body)).partition(b" ")
                await _answer(send, int(status), answer)
            except (OSError, ValueError):  # it is ending, or has ended
                await _refuse(send, 503, "the process that stages versions does not answer; try again soon")


async def _ask(socket: str, body: bytes) -> bytes:
    """Send a line to a Unix socket, and return the line that it answers."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(body.replace(b"\n", b" ") + b"\n")
        return await reader.readline()
    finally:
        writer.close()


def _end_vllm() -> None:
    """End vLLM at once; `flywheel engine` ends with it, and is restarted."""
    sys.stderr.write("an explorer ended vLLM, so that it starts again on the last good version\n")
    sys.stderr.flush()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _has_token(headers: Iterable[tuple[bytes, bytes]], header: str, token: bytes) -> bool:
    return bool(token) and any(name == header.encode() and hmac.compare_digest(value, token) for name, value in headers)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = b'{"error":{"message":"%s","type":"%s","param":null,"code":%d}}'
    kind = {404: b"not_found_error", 413: b"invalid_request_error", 503: b"engine_warming"}.get(
        status, b"permission_error"
    )
    await _answer(send, status, body % (message.encode(), kind, status))


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
