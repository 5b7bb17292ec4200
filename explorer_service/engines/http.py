"""The HTTP client for chats: a pool of persistent connections to engines.

Independent of what is sent; the administration of engines has its own client (admin.py).
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cached_property, partial
from urllib.parse import urlsplit

from explorer_service.engines.connection import EngineConnection, EngineResponse
from explorer_service.errors import EngineUnavailable

CONNECT_TIMEOUT_S = 10.0
# vLLM closes idle connections after 5 s; this client closes them earlier, so that no request uses a closing one.
KEEPALIVE_S = 4.0


class EngineHttp:
    """Connections of a process to all engines: `await post(...)`, then close the response."""

    def __init__(self, timeout_s: float, max_reply_bytes: int) -> None:
        """timeout_s: for a whole answer. max_reply_bytes: of its body, or of a whole stream."""
        self.timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._loop = asyncio.get_running_loop()
        self._idle: dict[str, list[EngineConnection]] = {}  # the last used one is last
        self._connections: set[EngineConnection] = set()

    async def post(self, url: str, path: str, body: bytes, headers: dict[str, str]) -> EngineResponse:
        """Send a request to an engine. Returns when the head of the answer has arrived.

        url: "http://host:port". If an idle connection turns out to be closed, the request is sent again on a new one.
        Raises EngineUnavailable, InvalidReply, TimeoutError.
        """
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        kept = self._take_idle(url)
        if kept is not None:
            response = self._send(kept, url, request)
            try:
                return await _with_head(response)
            except EngineUnavailable:
                if response.has_begun:
                    raise  # else the engine closed the connection while it was idle
        return await _with_head(self._send(await self._connect(url), url, request))

    def _send(self, connection: EngineConnection, url: str, request: bytes) -> EngineResponse:
        return connection.send(request, self.timeout_s, partial(self._release, url))

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def _connect(self, url: str) -> EngineConnection:
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    partial(EngineConnection, self._loop, self._max_reply_bytes),
                    parts.hostname or "",
                    parts.port or (443 if is_https else 80),
                    ssl=self._tls if is_https else None,
                )
        except TimeoutError as exc:
            raise EngineUnavailable(f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
        except OSError as exc:  # includes TLS errors
            raise EngineUnavailable(exc.strerror or str(exc)) from exc
        self._connections.add(connection)
        return connection

    def _take_idle(self, url: str) -> EngineConnection | None:
        """Return the last used idle connection that is still open, if any."""
        idle = self._idle.get(url, [])
        while idle:
            connection = idle.pop()
            if connection.is_open and self._loop.time() - connection.idle_since < KEEPALIVE_S:
                return connection
            self._end(connection)
        return None

    def _release(self, url: str, connection: EngineConnection, reusable: bool) -> None:
        if not (reusable and connection.is_open):
            self._end(connection)
            return
        connection.idle_since = now = self._loop.time()
        idle = self._idle.setdefault(url, [])
        while idle and now - idle[0].idle_since >= KEEPALIVE_S:
            self._end(idle.pop(0))
        idle.append(connection)

    def _end(self, connection: EngineConnection) -> None:
        self._connections.discard(connection)
        connection.abort()

    async def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._connections):
            self._end(connection)


async def _with_head(response: EngineResponse) -> EngineResponse:
    try:
        await response.wait_head()
    except BaseException:
        response.close(reusable=False)
        raise
    return response
