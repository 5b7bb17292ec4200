"""Split a connection's bytes into requests: one at a time, within limits.

The parser gets a whole head, then the body that the head announces, and nothing of the next request before the answer.
If the parser finds another end of a request than this module, FramingError closes the connection, so that one request
is never parsed as two. Uses no sockets and no clocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from explorer_service.api.errors import ApiError, bad_request

_MAX_AHEAD_BYTES = 65_536  # of pipelined requests
_MAX_TARGET_BYTES = 8192  # of the request line
_MAX_BODILESS_BYTES = 65_536  # of chunk extensions and trailers in a row
_MIN_PIECE_BYTES = 16_384  # of an incomplete body; smaller pieces are buffered
_MAX_BLANK_LINES = 1000  # in a chunked body; JSON has none

_END = b"\r\n\r\n"
_METHOD = re.compile(rb"[A-Z]{1,20}(?: |\Z)")
_UPGRADE = re.compile(rb"\r\nupgrade:[\t\x20-\x7e\x80-\xff]*(?=\r\n)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,30})[ \t]*\r\n")


class FramingError(Exception):
    """The connection's bytes can no longer be split into requests."""


class Awaited(Enum):
    """What the caller has to send next."""

    REQUEST = "request"  # no byte of the next request has arrived
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # the request is complete; it is being answered


class Requests:
    """The requests of one connection."""

    def __init__(self, max_head_bytes: int, max_headers: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._buffer = b""  # received, but not passed to the parser yet
        self._searched = 0  # its first bytes that contain no end of a head
        self.overrun = False  # too much was pipelined: drop it, and close the connection after the answer
        self.number = 0
        self._begin()

    def _begin(self) -> None:
        self.number += 1
        self.awaited = Awaited.REQUEST
        self._answered = False
        self._begun = self._ended = False  # according to the parser
        self._left: int | None = 0  # missing bytes of the body; None: it is chunked
        self._tail = b""  # the last bytes of the chunks so far
        self._bodiless_bytes = self._blank_lines = 0

    # ------------------------------------------------------------------- calls of the parser

    def found_begin(self) -> bool:
        """Note that a request begins. Returns whether it may begin here."""
        may_begin, self._begun = not self._begun, True
        return may_begin

    def found_body(self) -> None:
        self._bodiless_bytes = 0

    def found_end(self) -> None:
        self._ended = True

    # --------------------------------------------------------------------- received bytes

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that the parser may get now. It must parse each one before the next is requested.

        Raises ApiError for a head that is refused, FramingError.
        """
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        while at < len(data) and not self.overrun:
            if self.awaited is Awaited.NOTHING:
                self._buffer_ahead(data[at:])
                return
            if self.awaited is Awaited.BODY:
                if self._is_too_small(data, at):
                    self._buffer = data[at:]
                    return
                stop = self._end_of_body_piece(data, at)
                yield data[at:stop]
            else:
                self.awaited = Awaited.HEAD
                while data.startswith(b"\r\n", at):  # before a request (RFC 9112, 2.2)
                    at += 2
                head_end = self._end_of_head(data, at)
                if head_end is None:
                    return
                head = data[at:head_end]
                lowered = head.lower()
                self._left = _announced_length(lowered)
                stop = min(head_end + (self._left or 0), len(data))
                if b"\r\nupgrade:" in lowered:
                    yield _UPGRADE.sub(b"", head) + data[head_end:stop]
                else:
                    yield data[at:stop]
                self.awaited = Awaited.BODY
                if self._left:
                    self._left -= stop - head_end
            at = stop
            self._check_end()

    def end_answer(self) -> Iterator[bytes]:
        """Note that the whole answer was sent. Yields and raises like `split`."""
        self._answered = True
        if self.awaited is Awaited.NOTHING:
            self._begin()
            yield from self.split(b"")

    def _buffer_ahead(self, data: bytes) -> None:
        self.overrun = len(data) > _MAX_AHEAD_BYTES
        self._buffer, self._searched = b"" if self.overrun else data, 0

    def _check_end(self) -> None:
        """Raise FramingError unless the parser finds the end where it was announced; then set what is awaited."""
        if self._left is not None and self._ended != (self._left == 0):
            raise FramingError("the parser finds another end of the request")
        if self._bodiless_bytes > _MAX_BODILESS_BYTES or self._blank_lines > _MAX_BLANK_LINES:
            raise FramingError("the chunked body has too many extensions, trailers or blank lines")
        if self._ended:
            self.awaited = Awaited.NOTHING
            if self._answered:
                self._begin()

    # ----------------------------------------------------------------------------- heads

    def _end_of_head(self, data: bytes, at: int) -> int | None:
        """Return the end of the head that begins at `at`; None if it has not arrived yet. Raises ApiError."""
        end = data.find(_END, max(at, self._searched - 3))
        if end < 0:
            self._check_head(data, at, len(data))
            self._buffer, self._searched = data[at:], len(data) - at
            return None
        self._check_head(data, at, end + 4)
        self._searched = 0
        return end + 4

    def _check_head(self, data: bytes, at: int, end: int) -> None:
        if not _METHOD.match(data, at, at + 21) and data[at:end] not in (b"", b"\r"):
            raise bad_request("this is not a request of HTTP/1.1")
        lines = data.count(b"\r\n", at, end)
        if data.count(b"\n", at, end) != lines:
            raise bad_request("a line of the head ends without a carriage return")
        if data.startswith(b"CONNECT ", at):
            raise ApiError(405, "CONNECT is not supported", code="method_not_allowed")
        if end - at > self._max_head_bytes:
            raise _too_large(f"the head is larger than {self._max_head_bytes} bytes (explorer.max_head_bytes)")
        if lines - 2 > self._max_headers:
            raise _too_large(f"more than {self._max_headers} headers (explorer.max_headers)")
        if end - at > _MAX_TARGET_BYTES and data.find(b"\r\n", at, at + _MAX_TARGET_BYTES) < 0:
            raise ApiError(414, f"the request line is longer than {_MAX_TARGET_BYTES} bytes", code="target_too_long")

    # ---------------------------------------------------------------------------- bodies

    def _is_too_small(self, data: bytes, at: int) -> bool:
        """Whether a piece is too small for the parser: a caller may send bytes one by one."""
        size = len(data) - at
        if size >= _MIN_PIECE_BYTES:
            return False
        return _END not in self._tail + data[at:] if self._left is None else size < self._left

    def _end_of_body_piece(self, data: bytes, at: int) -> int:
        """Return the end of the piece of the body that begins at `at`, at most the end of the body."""
        if self._left is not None:
            stop = min(at + self._left, len(data))
            self._left -= stop - at
            return stop
        # Only the parser knows the end of a chunked body. It is always after an empty line.
        blank_line = (self._tail + data[at : at + 3]).find(_END)
        if blank_line >= 0:
            stop = at - len(self._tail) + blank_line + 4
        else:
            blank_line = data.find(_END, at)
            stop = blank_line + 4 if blank_line >= 0 else len(data)
        self._tail = (self._tail + data[max(at, stop - 3) : stop])[-3:]
        self._blank_lines += blank_line >= 0
        self._bodiless_bytes += stop - at
        return stop


def _announced_length(head: bytes) -> int | None:
    """Return the length of the body, in bytes, that a head in lower case announces; None: it is chunked.

    The parser refuses a head with both, or with two lengths. Raises ApiError 501 for any transfer coding but one
    `chunked`: a proxy in front of the explorer might find another end of the body.
    """
    codings = head.count(b"\r\ntransfer-encoding:")
    if codings:
        if codings > 1 or not _CHUNKED.search(head):
            raise ApiError(501, "the only supported transfer coding is one `chunked`", code="transfer_encoding")
        return None
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="head_too_large")
