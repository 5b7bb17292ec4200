"""uvicorn's HTTP protocol with limits.

uvicorn reads heads, trailers and pipelined requests without limits; it waits without limit for a head or for a caller
to read; after an Upgrade header, which Java's HTTP clients send, it parses the rest as the other protocol; and it stops
reading while a pipelined request waits, so it does not notice that the caller leaves. Here it gets one request at a
time (framing.py), and callers have deadlines.

This needs from uvicorn: an asyncio.Protocol with the callbacks of httptools, `transport`, `headers`, whether an answer
has begun (`cycle.response_started`), and the callbacks for its end and for what the parser refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from explorer_service.api.connections import Connections
from explorer_service.api.errors import ApiError, bad_request, unavailable
from explorer_service.api.framing import Awaited, FramingError, Requests

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the client closes them first
_LINGER_S = 2.0  # before a refused caller's connection is closed; earlier, it might not get the answer
_MIN_READ_BYTES = 65_536  # that a caller must read of a large answer in `body_timeout_s`


class ExplorerProtocol(HttpToolsProtocol):
    """One caller's connection."""

    def __init__(self, *, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._clock = asyncio.get_running_loop()
        self._connections = connections
        self._limits = connections.limits
        self._requests = Requests(self._limits.max_head_bytes, self._limits.max_headers)
        self._awaited: tuple[int, Awaited] | None = None
        self._deadline: float | None = None  # by the loop's clock, for what the caller has to send next
        self._timer: asyncio.TimerHandle | None = None  # at the deadline, or earlier
        self._read_timer: asyncio.TimerHandle | None = None  # for the caller to read
        self._unread_bytes = 0  # when the read timer was set
        self._is_refused = False  # further data is dropped

    # ---------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(self._limits.head_timeout_s)
        if not self._connections.admit(transport):
            message = "too many connections (explorer.max_connections); try again"
            self._refuse(unavailable(message, "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stop_read_timer()
        self._connections.remove(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._parse(self._requests.split(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._stop_read_timer()
        self._read_timer = self._clock.call_later(self._limits.body_timeout_s, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_read_timer()

    # --------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        if not self._requests.found_begin():
            self.transport.abort()  # so that uvicorn's answer to the error is not sent
            raise FramingError("the parser finds a request inside another one")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # for trailers; the request keeps the old list

    def on_body(self, body: bytes) -> None:
        self._requests.found_body()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._requests.found_end()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not take. Raises ApiError."""
        raise bad_request("this is not a valid request of HTTP/1.1; check its target, headers and body")

    # --------------------------------------------------------------- the answer's callback

    def on_response_complete(self) -> None:
        """The whole answer was passed to the transport."""
        super().on_response_complete()
        self._connections.end_answer(self.transport)
        if not self.transport.is_closing():  # after an answer that ends the connection, no request begins
            self._parse(self._requests.end_answer())
        if self._requests.overrun:
            self.transport.close()

    # ----------------------------------------------------------------------------- limits

    def _parse(self, pieces: Iterator[bytes]) -> None:
        try:
            for piece in pieces:
                super().data_received(piece)
                if self.transport.is_closing():
                    break
        except ApiError as error:
            self._refuse(error)
        except FramingError:
            self.transport.abort()
        else:
            self._await_next()

    def _await_next(self) -> None:
        """Set the deadline for what the caller has to send next, if that has changed."""
        awaited = (self._requests.number, self._requests.awaited)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        match self._requests.awaited:
            case Awaited.REQUEST:
                self._set_deadline(KEEP_ALIVE_S)
            case Awaited.HEAD:
                self._set_deadline(self._limits.head_timeout_s)
            case Awaited.BODY:
                self._set_deadline(self._limits.body_timeout_s)
            case Awaited.NOTHING:
                self._connections.begin_answer(self.transport)
                self._set_deadline(None)

    def _refuse(self, error: ApiError) -> None:
        """Send an error, and read no more requests."""
        self._is_refused = True
        response = error.response()
        headers = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
        head = b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n" % (response.status_code, headers)
        self.transport.write(head + bytes(response.body))
        self.transport.write_eof()
        self._set_deadline(_LINGER_S)

    def _set_deadline(self, seconds: float | None) -> None:
        """Give the caller this time from now; None: unlimited.

        A timer that is set to an earlier time stays: each request sets several deadlines, and most are met.
        """
        if seconds is None:
            self._deadline = None
            return
        self._deadline = deadline = self._clock.time() + seconds
        if self._timer is None or self._timer.when() > deadline:
            self._set_timer(deadline)

    def _set_timer(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(moment, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._clock.time() < self._deadline:
            self._set_timer(self._deadline)
        elif self._read_timer is not None and self._requests.awaited is Awaited.REQUEST:  # still reading the answer
            self._set_deadline(KEEP_ALIVE_S)
        elif self._requests.awaited is Awaited.BODY and not self._is_refused and not self.cycle.response_started:
            limit = f"{self._limits.body_timeout_s:g} s (explorer.body_timeout_s)"
            self._refuse(ApiError(408, f"the body did not arrive within {limit}", code="body_too_slow"))
        else:
            self.transport.abort()

    def _check_reader(self) -> None:
        """Close the connection of a caller that does not read. This also ends an answer that waits to be sent."""
        read_bytes = self._unread_bytes - self.transport.get_write_buffer_size()
        if read_bytes < _MIN_READ_BYTES:
            self.transport.abort()
        else:
            self.pause_writing()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
