"""A connection's bytes as requests: one at a time, within limits.

The parser gets a whole head, then the body that the head announces, and nothing of the next request before the answer.
Where the parser sees another end of a request than this module does, FramingError ends the connection: a request is
never taken for two. Knows no sockets and no clocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from explorer_service.api.errors import ApiError, bad_request

_MAX_AHEAD_BYTES = 65_536  # of requests that are sent before the answer to the one before them
_MAX_TARGET_BYTES = 8192  # method and version included
_MAX_BODILESS_BYTES = 65_536  # of chunks: extensions and trailers in a row
_LEAST_PIECE_BYTES = 16_384  # of a body that is not complete: less of it waits for more
_MAX_BLANK_LINES = 1000  # in a chunked body; JSON has none

_END = b"\r\n\r\n"
_METHOD = re.compile(rb"[A-Z]{1,20}(?: |\Z)")
_OFFER = re.compile(rb"\r\nupgrade:[\t\x20-\x7e\x80-\xff]*(?=\r\n)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,30})[ \t]*\r\n")


class FramingError(Exception):
    """This connection can no longer be read as requests."""


class Awaited(Enum):
    """What is expected of the caller."""

    REQUEST = "request"  # nothing of the next request is here
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # the request is complete; its answer is awaited


class Requests:
    """The requests of one connection."""

    def __init__(self, max_head_bytes: int, max_headers: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._held = b""  # received, and not for the parser yet
        self._searched = 0  # how much of it holds no end of a head
        self.overrun = False  # too much was sent ahead: it is thrown away, and the connection ends with the answer
        self.number = 0
        self._begin()

    def _begin(self) -> None:
        self.number += 1
        self.awaited = Awaited.REQUEST
        self._answered = False
        self._begun = self._ended = False  # as the parser sees it
        self._left: int | None = 0  # bytes of the body still to come; None: chunks
        self._tail = b""  # the last bytes of the chunks so far
        self._bodiless_bytes = self._blank_lines = 0

    # -------------------------------------------------------------- what the parser finds

    def found_begin(self) -> bool:
        """Whether a request may begin here."""
        may_begin, self._begun = not self._begun, True
        return may_begin

    def found_body(self) -> None:
        self._bodiless_bytes = 0

    def found_end(self) -> None:
        self._ended = True

    # --------------------------------------------------------------------- what comes in

    def split(self, data: bytes) -> Iterator[bytes]:
        """What the parser may have now; it has to take each piece before the next one is asked for.

        Raises ApiError for a head that is refused, FramingError.
        """
        if self._held:
            data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and not self.overrun:
            if self.awaited is Awaited.NOTHING:
                self._hold_ahead(data[at:])
                return
            if self.awaited is Awaited.BODY:
                if self._waits_for_more(data, at):
                    self._held = data[at:]
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
                    yield _OFFER.sub(b"", head) + data[head_end:stop]
                else:
                    yield data[at:stop]
                self.awaited = Awaited.BODY
                if self._left:
                    self._left -= stop - head_end
            at = stop
            self._check_end()

    def end_answer(self) -> Iterator[bytes]:
        """The answer was sent, whole. What the parser may have now, as of `split`."""
        self._answered = True
        if self.awaited is Awaited.NOTHING:
            self._begin()
            yield from self.split(b"")

    def _hold_ahead(self, data: bytes) -> None:
        self.overrun = len(data) > _MAX_AHEAD_BYTES
        self._held, self._searched = b"" if self.overrun else data, 0

    def _check_end(self) -> None:
        """Whether the parser sees the end of the request where it was announced; then what is expected next."""
        if self._left is not None and self._ended != (self._left == 0):
            raise FramingError("the parser sees another end of a request")
        if self._bodiless_bytes > _MAX_BODILESS_BYTES or self._blank_lines > _MAX_BLANK_LINES:
            raise FramingError("chunks of little but extensions, trailers or blank lines")
        if self._ended:
            self.awaited = Awaited.NOTHING
            if self._answered:
                self._begin()

    # ----------------------------------------------------------------------------- heads

    def _end_of_head(self, data: bytes, at: int) -> int | None:
        """Where the head ends that begins at `at`; None when that is not here yet. Raises ApiError."""
        end = data.find(_END, max(at, self._searched - 3))
        if end < 0:
            self._check_head(data, at, len(data))
            self._held, self._searched = data[at:], len(data) - at
            return None
        self._check_head(data, at, end + 4)
        self._searched = 0
        return end + 4

    def _check_head(self, data: bytes, at: int, end: int) -> None:
        if not _METHOD.match(data, at, at + 21) and data[at:end] not in (b"", b"\r"):
            raise bad_request("this is no request of HTTP/1.1")
        lines = data.count(b"\r\n", at, end)
        if data.count(b"\n", at, end) != lines:
            raise bad_request("a line of the head ends without a carriage return")
        if data.startswith(b"CONNECT ", at):
            raise ApiError(405, "CONNECT is not served here", code="method_not_allowed")
        if end - at > self._max_head_bytes:
            raise _too_large(f"the head is larger than {self._max_head_bytes} bytes (explorer.max_head_bytes)")
        if lines - 2 > self._max_headers:
            raise _too_large(f"more than {self._max_headers} headers (explorer.max_headers)")
        if end - at > _MAX_TARGET_BYTES and data.find(b"\r\n", at, at + _MAX_TARGET_BYTES) < 0:
            raise ApiError(414, f"the request line is longer than {_MAX_TARGET_BYTES} bytes", code="target_too_long")

    # ---------------------------------------------------------------------------- bodies

    def _waits_for_more(self, data: bytes, at: int) -> bool:
        """Whether these bytes are too few to wake the request for: a caller may send them one by one."""
        size = len(data) - at
        if size >= _LEAST_PIECE_BYTES:
            return False
        return _END not in self._tail + data[at:] if self._left is None else size < self._left

    def _end_of_body_piece(self, data: bytes, at: int) -> int:
        """Where the next piece of the body ends, that begins at `at`: at its end at the latest."""
        if self._left is not None:
            stop = min(at + self._left, len(data))
            self._left -= stop - at
            return stop
        # The end of chunks is known to the parser alone. It is always an empty line.
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
    """Bytes of the body that a head in lower case announces; None: chunks.

    The parser refuses a head that says both, or a length twice. Raises ApiError 501 for another coding than chunks, or
    several: a proxy before us might see another end of the body.
    """
    codings = head.count(b"\r\ntransfer-encoding:")
    if codings:
        if codings > 1 or not _CHUNKED.search(head):
            raise ApiError(501, "of transfer codings only `chunked` is understood, once", code="transfer_encoding")
        return None
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="head_too_large")
