"""A request that goes to an engine, and its answer's way back to the caller.

On the hot path of chat: it stands in the place of uvicorn's own cycle of request and response, so that a chat meets
none of ASGI's messages. (In turns, a plain chat alone took 0.48 ms of CPU with it and 0.53 without.) Owns no socket and
no parser: those are the protocol's (door.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from explorer_service.errors import ApiError, body_too_large, body_too_slow, our_fault
from shared.config import ExplorerConfig
from shared.log import StageLogger

log = StageLogger("explorer")
VERSION_HEADER = "X-Flywheel-Version"
_CALLER_WENT = 499


class Call(HTTPConnection):
    """One request: `await read()`, then `answer()`, or `begin()`, `send()` for each part and `end()`.

    When the caller goes away the handler is cancelled, wherever it waits.
    """

    def __init__(
        self,
        scope: dict[str, Any],
        path: str,
        handler: Callable[[Call, Any], Awaitable[None]],
        protocol: HttpToolsProtocol,
        *,
        keep_alive: bool,
    ) -> None:
        super().__init__(scope)
        self.path = path
        self.status = 500  # what was answered; so it stays when nothing is
        self._begun = False
        self._handler = handler
        self._protocol = protocol
        self._task: asyncio.Task[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None  # for more of the body
        # What the protocol reads and writes:
        self.body = bytearray()
        self.more_body = True
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False

    # ------------------------------------------------------------------ the protocol's calls

    async def run_asgi(self, _app: object) -> None:
        """The request's task."""
        self._task = asyncio.current_task()
        try:
            if not self.disconnected:  # before it could begin
                await self._handler(self, self.scope["state"]["deps"])
        except ApiError as error:
            self.fail(error)
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
        except Exception as error:  # noqa: BLE001 — the boundary of a request
            log.error("a request failed for a reason of ours", path=self.path, error=repr(error))
            self.fail(our_fault())
        finally:
            self._task = None
            del self._protocol  # which holds this one until the next, or neither would be freed with the connection

    @property
    def message_event(self) -> Call:
        """What the protocol sets when something happens."""
        return self

    def set(self) -> None:
        """Something of the body has come, or the caller has gone."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.disconnected and self._task is not None:
            self.status = _CALLER_WENT
            self._task.cancel()

    # ------------------------------------------------------------------ the handler's calls

    async def read(self, config: ExplorerConfig) -> bytes:
        """The whole body.

        Raises ApiError 413 when it is longer than `max_body_bytes`, without reading on; 408 when it takes longer than
        `body_timeout_s`.
        """
        if self.more_body:
            await self._wait_for_body(config)
        if len(self.body) > config.max_body_bytes:
            raise body_too_large(config.max_body_bytes)
        if not self._protocol.pipeline:  # to see when the caller goes away; a long body has ended it
            self._protocol.flow.resume_reading()
        return bytes(self.body)

    async def _wait_for_body(self, config: ExplorerConfig) -> None:
        if self._protocol.expect_100_continue:
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(config.body_timeout_s):
                while self.more_body and len(self.body) <= config.max_body_bytes:
                    self._waiter = loop.create_future()
                    self._protocol.flow.resume_reading()
                    await self._waiter
        except TimeoutError:
            raise body_too_slow(config.body_timeout_s) from None

    def answer(self, response: Response) -> None:
        """The whole answer, in one write."""
        self._write(response.status_code, response.raw_headers, bytes(response.body))
        self._finish()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of an answer of server-sent events."""
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        raw += ((b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked"))
        self._write(status, raw)

    def send(self, part: bytes) -> None:
        """A part of its body, as it comes. What the network does not take waits here: look at `is_free`."""
        if not self.disconnected:
            self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    @property
    def is_free(self) -> bool:
        """Whether the caller keeps up."""
        return not self._protocol.flow.write_paused

    async def drain(self) -> None:
        """Until the caller keeps up again."""
        if self._protocol.flow.write_paused:
            await self._protocol.flow.drain()

    def end(self, last: bytes = b"") -> None:
        """The end of the body, in one write with its last part."""
        if not self.disconnected:
            part = b"%x\r\n%b\r\n" % (len(last), last) if last else b""
            self._protocol.transport.write(part + b"0\r\n\r\n")
        self._finish()

    def break_off(self) -> None:
        """End the connection, so that the caller takes what has come for what it is: not whole."""
        self.response_complete = True
        self._protocol.transport.close()

    def fail(self, error: ApiError) -> None:
        """The error as the answer, or an answer broken off."""
        if self._begun:
            self.break_off()
        else:
            self.answer(error.response())

    # ------------------------------------------------------------------

    def _write(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> None:
        self.status, self._begun = status, True
        if self.disconnected:
            return
        lines = [STATUS_LINE[status]]
        for name, value in (*self._protocol.server_state.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        lines += (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n", body)
        self._protocol.transport.write(b"".join(lines))

    def _finish(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()
