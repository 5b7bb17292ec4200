"""uvicorn's HTTP protocol with limits, and nothing else.

uvicorn reads heads, trailers and requests sent ahead without limits, waits for ever for a head or a reader, takes what
follows an offer of another protocol for that protocol (Java's HTTP clients make such offers), and stops reading while a
request sent ahead waits, so that it does not notice when the caller leaves. Here it gets one request at a time
(framing.py), and what is expected of a caller has to come in time.

Of uvicorn this needs an asyncio.Protocol with the callbacks of httptools, `transport`, `headers`, whether an answer has
begun (`cycle.response_started`), and the callback for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from explorer_service.api.connections import Connections
from explorer_service.api.errors import ApiError, unavailable
from explorer_service.api.framing import Awaited, FramingError, Requests

KEEP_ALIVE_S = 75  # longer than clients keep idle connections: theirs close first, and none in use
_LINGER_S = 2.0  # how long a refused caller may go on sending: closed at once it might not see why
_MIN_READ_BYTES = 65_536  # of a large answer in `body_timeout_s`


class ExplorerProtocol(HttpToolsProtocol):
    """One caller's connection."""

    def __init__(self, *, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._clock = asyncio.get_running_loop()
        self._connections = connections
        self._limits = connections.limits
        self._requests = Requests(self._limits.max_head_bytes, self._limits.max_headers)
        self._awaited: tuple[int, Awaited] | None = None
        self._deadline: float | None = None  # the loop's clock: when what is expected of the caller has to be here
        self._timer: asyncio.TimerHandle | None = None  # at the deadline, or at one before it
        self._read_timer: asyncio.TimerHandle | None = None  # for it to read
        self._unread_bytes = 0  # when that one was set
        self._is_refused = False  # what still comes is thrown away

    # ---------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self._limits.head_timeout_s)
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
            self.transport.abort()  # so that uvicorn's answer to the error reaches nobody
            raise FramingError("the parser sees a request inside another one")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # trailers go here, and the request has the list before

    def on_body(self, body: bytes) -> None:
        self._requests.found_body()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._requests.found_end()
        super().on_message_complete()

    # --------------------------------------------------------------- the answer's callback

    def on_response_complete(self) -> None:
        """The answer to the request is with the transport, whole."""
        super().on_response_complete()
        self._connections.end_answer(self.transport)
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
            self._expect()

    def _expect(self) -> None:
        """Wait for what the caller has to do next, if that is another thing than before."""
        awaited = (self._requests.number, self._requests.awaited)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        match self._requests.awaited:
            case Awaited.REQUEST:
                self._wait(KEEP_ALIVE_S)
            case Awaited.HEAD:
                self._wait(self._limits.head_timeout_s)
            case Awaited.BODY:
                self._wait(self._limits.body_timeout_s)
            case Awaited.NOTHING:
                self._connections.begin_answer(self.transport)
                self._wait(None)

    def _refuse(self, error: ApiError) -> None:
        """Answer, and read no more requests."""
        self._is_refused = True
        response = error.response()
        headers = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
        head = b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n" % (response.status_code, headers)
        self.transport.write(head + bytes(response.body))
        self.transport.write_eof()
        self._wait(_LINGER_S)

    def _wait(self, seconds: float | None) -> None:
        """From now on so long for the caller; None: as long as it takes.

        A timer that is set already stays where it rings in time: each request sets several deadlines, and meets them.
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
        elif self._read_timer is not None and self._requests.awaited is Awaited.REQUEST:  # it reads the last answer
            self._wait(KEEP_ALIVE_S)
        elif self._requests.awaited is Awaited.BODY and not self._is_refused and not self.cycle.response_started:
            limit = f"{self._limits.body_timeout_s:g} s (explorer.body_timeout_s)"
            self._refuse(ApiError(408, f"the body did not arrive within {limit}", code="body_too_slow"))
        else:
            self.transport.abort()

    def _check_reader(self) -> None:
        """Close the connection of a caller who does not read. An answer that waits to be sent ends with it."""
        read_bytes = self._unread_bytes - self.transport.get_write_buffer_size()
        if read_bytes < _MIN_READ_BYTES:
            self.transport.abort()
        else:
            self.pause_writing()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
