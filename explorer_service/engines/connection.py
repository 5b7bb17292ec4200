"""Kept-alive HTTP/1.1 connections to engines: what a chat needs and no more.

On the hot path of chat, where a client library for everybody was a sixth of the explorer's work
(decision 8). HTTP is parsed by httptools, as uvicorn's is; an engine's administration goes through
aiohttp (client.py). Owns the sockets. Knows nothing of chats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
# vLLM closes idle connections after 5 s; ours go first, so that no request meets a closing one.
KEEPALIVE_S = 4.0
_MOST_BUFFERED = 1 << 20  # bytes of an answer that nobody has taken yet, before the engine is made to wait


class ConnectionLost(Exception):
    """The engine cannot be reached, broke off, or speaks no HTTP."""


class ConnectionRefused(ConnectionLost):
    """There is no connection to be had."""


class _Line(asyncio.Protocol):
    """One connection, and the answer that is coming in on it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.alive = False
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.begin()

    def begin(self) -> None:
        """Forget the last answer."""
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.content_type = ""
        self.head = self.complete = self.reusable = self._sized = self._paused = False
        self.taker: Callable[[bytes], bool] | None = None  # called with what comes
        self.held_up = False  # the taker takes no more for now
        self.chunks: list[bytes] = []
        self.buffered = 0
        self.error: Exception | None = None

    # ------------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.alive = True

    def data_received(self, data: bytes) -> None:
        if self.complete:  # more than was asked for: nothing on this connection can be trusted
            self.close()
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.fail(ConnectionLost(f"its answer is no HTTP: {exc}"))
        if self.buffered > _MOST_BUFFERED and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self.taker is None or self.held_up or not self._hand_over(self.taker):
            self._wake()

    def _hand_over(self, taker: Callable[[bytes], bool]) -> bool:
        """Give what has come to the taker. False: whoever waits for the answer has something to do."""
        try:
            goes_on = not self.chunks or taker(self.take())
        except Exception as exc:  # noqa: BLE001 — of whoever waits: it is raised there, also when the answer is whole
            self.error = exc
            self.close()
            return False
        self.held_up = not goes_on
        return goes_on and not self.complete and self.error is None

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self.head and not self._sized and exc is None:
            self.complete = True  # an answer without a length ends with its connection
        if not self.complete and self.error is None:
            self.error = ConnectionLost(str(exc) if exc else "it closed the connection")
        self._wake()

    # ------------------------------------------------------------------ the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head = True

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)
        self.buffered += len(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.reusable = self.parser.should_keep_alive()

    # ------------------------------------------------------------------ the owner's calls

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def fail(self, error: Exception) -> None:
        """End the connection, and the answer with this error."""
        if not self.complete and self.error is None:
            self.error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """At once: whatever the engine is sampling for it is aborted."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    def more(self) -> asyncio.Future[None]:
        """Done when something has come of the answer, its end or its error. Raises an error that was there before."""
        if self.error is not None:
            raise self.error
        self._waiter = self._loop.create_future()
        return self._waiter

    async def wait_head(self) -> None:
        """Until the answer's status and headers are there. Raises its error."""
        while not self.head:
            await self.more()

    def take(self) -> bytes:
        """What has come in since the last time."""
        chunks = self.chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self.chunks = []
        self.buffered = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Reply:
    """An engine's answer: its head is there, its body comes. To be closed by whoever got it."""

    __slots__ = ("_connections", "_line", "_timer")

    def __init__(self, line: _Line, timer: asyncio.TimerHandle, connections: Connections) -> None:
        self._line = line
        self._timer = timer
        self._connections = connections

    @property
    def status(self) -> int:
        return self._line.status

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self._line.content_type.partition(";")[0].strip().lower()

    @property
    def is_whole(self) -> bool:
        """Whether its end has come."""
        return self._line.complete

    async def read(self) -> bytes:
        """The rest of the body. Raises ConnectionLost, TimeoutError."""
        line = self._line
        while not line.complete:
            await line.more()
        return line.take()

    async def read_some(self) -> bytes:
        """What has come of the body; nothing at its end. Raises ConnectionLost, TimeoutError."""
        line = self._line
        while not line.chunks and not line.complete:
            await line.more()
        return line.take()

    async def flow(self, take: Callable[[bytes], bool]) -> bool:
        """Give the body to `take`, each part as it comes, until that returns False: it has to wait for something.

        Returns whether the body has ended. Raises ConnectionLost, TimeoutError, and what `take` raises.
        """
        line = self._line
        while True:
            if line.chunks and not take(line.take()):
                return False
            if line.error is not None:
                raise line.error
            if line.complete:
                return True
            line.taker, line.held_up = take, False
            try:
                await line.more()
            finally:
                line.taker = None
            if line.held_up:
                return False

    def close(self) -> None:
        """Keep the connection for the next request; one whose answer is not whole is cut, and the engine aborts."""
        self._timer.cancel()
        self._connections.give_back(self._line)


class Connections:
    """Connections to all engines of a process: `await request(...)`, then close the reply."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # for a whole answer
        self._idle: dict[str, list[_Line]] = {}
        self._lines: set[_Line] = set()

    async def request(self, method: str, origin: str, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        """Send a request; return when the head of its answer is there.

        origin: "http://host:port". A kept connection that turns out to be closed is replaced by a new one, once.
        Raises ConnectionRefused when there is none to be had, ConnectionLost, TimeoutError.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host = origin.partition("://")[2]
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        line = self._kept(origin)
        if line is not None:
            try:
                return await self._ask(line, data)
            except ConnectionLost:
                if line.head:
                    raise
        return await self._ask(await self._connect(origin), data)

    async def _ask(self, line: _Line, data: bytes) -> Reply:
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, line)
        try:
            line.write(data)
            await line.wait_head()
        except BaseException:
            timer.cancel()
            self._drop(line)
            raise
        return Reply(line, timer, self)

    def _give_up(self, line: _Line) -> None:
        line.fail(TimeoutError(f"no whole answer within {self._timeout_s:g} s"))

    async def _connect(self, origin: str) -> _Line:
        parts = urlsplit(origin)
        tls = parts.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, line = await loop.create_connection(
                    lambda: _Line(origin), parts.hostname or "", parts.port or (443 if tls else 80), ssl=tls or None
                )
        except TimeoutError:
            raise ConnectionRefused(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as exc:
            raise ConnectionRefused(exc.strerror or str(exc)) from exc
        self._lines.add(line)
        return line

    def _kept(self, origin: str) -> _Line | None:
        lines = self._idle.get(origin)
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while lines:
            line = lines.pop()
            if line.alive and line.idle_since > oldest:
                line.begin()
                return line
            self._drop(line)
        return None

    def give_back(self, line: _Line) -> None:
        """Keep the line when its answer came whole and the engine keeps it open; else end it."""
        if not (line.alive and line.complete and line.reusable):
            self._drop(line)
            return
        line.idle_since = asyncio.get_running_loop().time()
        lines = self._idle.setdefault(line.origin, [])
        while lines and (not lines[0].alive or lines[0].idle_since < line.idle_since - KEEPALIVE_S):
            self._drop(lines.pop(0))
        lines.append(line)

    def _drop(self, line: _Line) -> None:
        self._lines.discard(line)
        line.close()

    def close(self) -> None:
        """End all connections."""
        for line in tuple(self._lines):
            self._drop(line)
