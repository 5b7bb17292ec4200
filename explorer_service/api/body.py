"""Reading request bodies, and noticing that a caller has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from explorer_service.api.errors import ApiError, bad_request, unavailable
from explorer_service.errors import NO_JSON, CallerLeft
from shared.config import ExplorerConfig

T = TypeVar("T")
_MOST_SHOWN, _LONGEST_SHOWN = 10, 100  # ignored fields that an answer names; characters of a name
SMALL_BODY_BYTES = 65_536  # the usual chat: a crowd of large bodies does not keep it out
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class BodyReader:
    """Reads bodies, and knows how much of unfinished ones all callers together have sent."""

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config
        self.held_bytes = 0  # of unfinished bodies that are larger than SMALL_BODY_BYTES

    async def read(self, request: Request) -> bytes:
        """The whole body.

        Raises ApiError 413 when it is longer than `max_body_bytes`, without reading on; 503 when it and the unfinished
        bodies of others are larger than `max_unfinished_bytes`; 400 when it is too much to decode; CallerLeft, and that
        also when the connection gave the body up (protocol.py).
        """
        body = await self._read(request)
        _check_values(body, self._config.max_body_values)
        return bytes(body)

    async def _read(self, request: Request) -> bytearray:
        limit, body, more, held = self._config.max_body_bytes, bytearray(), True, 0
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise CallerLeft
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit:
                    reason = f"the body is larger than {limit} bytes (explorer.max_body_bytes)"
                    raise ApiError(413, reason, code="body_too_large")
                if more and len(body) > SMALL_BODY_BYTES:
                    self.held_bytes += len(body) - held
                    held = len(body)
                    if self.held_bytes > self._config.max_unfinished_bytes:
                        reason = "too much of unfinished bodies is held (explorer.max_unfinished_bytes); try again"
                        raise unavailable(reason, "too_many_bodies")
        finally:
            self.held_bytes -= held
        return body


def _check_values(body: bytearray, most: int) -> None:
    """Decoding takes time for objects, lists and their keys, during which nobody else is served; hardly for text."""
    if len(body) > most and sum(map(body.count, (b"[", b"{", b":"))) > most:
        message = f"the body has more than {most} opening brackets and colons (explorer.max_body_values)"
        raise ApiError(400, message, code="body_too_complex")


def decode_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400 for anything else, NaN and infinity included."""
    return decode_typed(raw, _decode_object)


def decode_typed(raw: bytes, decode: Callable[[bytes], T]) -> T:
    """A JSON object of the fields that `decode` knows. Raises ApiError 400 for anything else."""
    try:
        return decode(raw)
    except msgspec.ValidationError as exc:
        raise bad_request(str(exc)) from exc
    except NO_JSON as exc:
        raise bad_request(f"the body is not a JSON object: {exc}") from exc


def ignored_fields(raw: bytes, body: msgspec.Struct) -> list[str]:
    """The first fields of a decoded JSON object that its type does not have: likely misspelled."""
    given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return [name[:_LONGEST_SHOWN] for name in given if name not in body.__struct_fields__][:_MOST_SHOWN]


class while_caller_waits:
    """Cancel the block when the caller closes its connection, and raise CallerLeft.

    Leave the block before the answer's last part: a server reports the end of an answer as a disconnect, too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._wait_for_disconnect())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.cancel()
        del self._watch  # a cancelled task's traceback refers to this object: a cycle would hold the whole request
        if self._left and kind is asyncio.CancelledError and not self._task.uncancel():
            raise CallerLeft from None

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
