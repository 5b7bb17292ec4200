"""One connection to an engine, and its answers: HTTP/1.1, parsed by httptools, like uvicorn.

A general HTTP client would take much of the CPU time of a recorded chat (decision 8). This one has only what a chat
needs: one request at a time, backpressure on the body, and no data accepted that answers no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from explorer_service.errors import EngineUnavailable, InvalidReply
from shared import clock

MAX_HEAD_BYTES = 64 * 1024
MAX_UNREAD_BYTES = 1024 * 1024  # of a body, before the engine has to wait
_BODILESS = (204, 205, 304)  # invalid answers to the requests that are sent here


class EngineConnection(asyncio.Protocol):
    """A connection that is idle or has one request in flight."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_reply_bytes: int) -> None:
        self.loop = loop
        self.max_reply_bytes = max_reply_bytes
        self.is_open = False
        self.idle_since = 0.0  # by the event loop's clock
        self._response: EngineResponse | None = None

    def send(
        self, request: bytes, timeout_s: float, release: Callable[[EngineConnection, bool], None]
    ) -> EngineResponse:
        """Send a whole request.

        timeout_s: for the whole answer. release: called when the response is closed, with whether the connection is
        reusable.
        """
        self._response = response = EngineResponse(self, timeout_s, release)
        self.transport.write(request)
        return response

    def abort(self) -> None:
        """Close the connection at once. The engine then aborts the request."""
        self.is_open = False
        self.transport.abort()

    # ------------------------------------------------------------------ calls of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is another class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.is_complete:  # data without a request
            self.abort()
        else:
            self._response.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._response is not None:
            self._response.end(exc)


class EngineResponse:
    """An engine's answer to one request. The receiver must close it."""

    __slots__ = (
        "_announced_bytes", "_body_bytes", "_connection", "_error", "_head_bytes", "_is_delimited", "_is_interim",
        "_is_paused", "_parser", "_parts", "_release", "_timeout_s", "_timer", "_unread_bytes", "_waiter",
        "content_type", "first_at", "has_begun", "has_head", "is_complete", "is_persistent", "received_at", "status",
    )  # fmt: skip

    def __init__(
        self, connection: EngineConnection, timeout_s: float, release: Callable[[EngineConnection, bool], None]
    ) -> None:
        self._connection = connection
        self._release = release
        self._timeout_s = timeout_s
        self._timer = connection.loop.call_later(timeout_s, self._expire)
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._parts: list[bytes] = []
        self._announced_bytes = self._body_bytes = self._unread_bytes = self._head_bytes = 0
        self._is_paused = self._is_delimited = self._is_interim = False
        self.status = 0
        self.content_type = ""  # without its parameters
        self.first_at = self.received_at = 0.0  # clock.since_boot_s(): when the body's first and the last byte arrived
        self.has_begun = False  # a byte has arrived
        self.has_head = False
        self.is_complete = False
        self.is_persistent = False  # whether the engine keeps the connection open

    async def wait_head(self) -> None:
        """Wait for status and headers. Raises EngineUnavailable, InvalidReply, TimeoutError."""
        while not self.has_head:
            await self._wait()

    async def read(self) -> bytes:
        """Read the rest of the body. Raises EngineUnavailable, InvalidReply, TimeoutError."""
        parts = [self._take()]
        while not self.is_complete:
            await self._wait()
            parts.append(self._take())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def peek(self) -> bytes:
        """Return the whole body, and keep it for `read`. Raises EngineUnavailable, InvalidReply, TimeoutError."""
        body = await self.read()
        self._parts = [body]
        return body

    async def read_some(self) -> bytes:
        """Return the body's bytes since the last call; none at its end.

        Raises EngineUnavailable, InvalidReply, TimeoutError.
        """
        while not self._parts and not self.is_complete:
            await self._wait()
        return self._take()

    def fail(self, error: Exception) -> None:
        """Fail the answer with this error, and close the connection."""
        if not self.is_complete and self._error is None:
            self._error = error
            self._connection.abort()
            self._wake()

    def close(self, *, reusable: bool = True) -> None:
        """Keep the connection for the next request if the answer is complete; else close it: the engine aborts."""
        self._timer.cancel()
        self._parser = None  # it refers to this object
        self._release(self._connection, reusable and self.is_complete and self.is_persistent)

    def _take(self) -> bytes:
        parts = self._parts
        if not parts:
            return b""
        self._parts, self._unread_bytes = [], 0
        if self._is_paused:
            self._is_paused = False
            self._connection.transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _wait(self) -> None:
        """Wait for data or the end of the answer. Raises the error that ended it early."""
        if self._error is None:
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def _expire(self) -> None:
        self.fail(TimeoutError(f"no complete answer within {self._timeout_s:g} s"))

    def _refuse(self, what: str) -> None:
        self.fail(InvalidReply(f"{what} than {self._connection.max_reply_bytes} bytes (explorer.max_reply_bytes)"))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ------------------------------------------------------------------ calls of the connection

    def feed(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._parser is None:  # closed
            return
        self.has_begun = True
        self.received_at = clock.since_boot_s()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.is_persistent = False
            self.fail(EngineUnavailable(f"its answer is not HTTP: {exc}"))
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(EngineUnavailable(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes"))
        elif self._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused and self._error is None:
            self._is_paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def end(self, exc: Exception | None) -> None:
        """The connection was closed."""
        if self._error is None and not self.is_complete:
            if self.has_head and not self._is_delimited and exc is None:
                self.is_complete = True  # an answer without a length ends with its connection
            else:
                self._error = EngineUnavailable(str(exc) if exc else "it closed the connection")
        self._wake()

    # ------------------------------------------------------------------ calls of the parser

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second answer: the connection cannot be trusted
            self.is_persistent = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:  # a trailer
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"content-length":
            self._is_delimited = True
            self._announced_bytes = int(value)
        elif name == b"transfer-encoding":
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.is_complete:
            return
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200  # informational; the answer follows
        if self._is_interim:
            return
        if not 200 <= status < 600 or status in _BODILESS:
            self.fail(EngineUnavailable(f"it answered with status {status}"))
            return
        if self._announced_bytes > self._connection.max_reply_bytes:
            self._refuse(f"the engine's reply of {self._announced_bytes} bytes is larger")
            return
        self.status, self.has_head = status, True

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            if not self._body_bytes:
                self.first_at = self.received_at
            self._parts.append(body)
            self._unread_bytes += len(body)
            self._body_bytes += len(body)
            if self._body_bytes > self._connection.max_reply_bytes:
                self._refuse("the engine's reply is larger")

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._is_interim and not self.is_complete:
            self.is_complete = True
            self.is_persistent = self._parser.should_keep_alive()
