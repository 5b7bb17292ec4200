"""An ASGI middleware that vLLM's server loads: closed until the engine is warm.

The first requests to a fresh engine compile kernels for up to half a minute. Until warm-up is over every route answers
503 to everyone but the warm-up itself, so that no health check counts the engine as ready too early. Imports nothing:
it runs inside vLLM's process.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TOKEN_VARIABLE = "ENGINE_WARMUP_TOKEN"  # no FLYWHEEL_ prefix: that would be a setting
TOKEN_HEADER = "x-flywheel-warmup"
OPEN_PATH = "/flywheel/open"
_BODY = (
    b'{"error":{"message":"the engine is warming up; try again soon","type":"engine_warming","param":null,"code":503}}'
)


class WarmupGate:
    """Answers 503 until the holder of the token asks for OPEN_PATH; passes everything afterwards."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "").encode()
        self._open = not self._token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._open or scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (TOKEN_HEADER.encode(), self._token) not in scope["headers"]:
            await _answer(send, 503, _BODY)
        elif scope["path"] == OPEN_PATH:
            self._open = True
            await _answer(send, 200, b"{}")
        else:
            await self._app(scope, receive, send)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"retry-after", b"5"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
