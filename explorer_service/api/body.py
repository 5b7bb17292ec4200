"""Read request bodies, and detect that a caller closed its connection."""

from __future__ import annotations

import asyncio
import re
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
SMALL_BODY_BYTES = 65_536  # exempt from `max_unfinished_bytes`, so that large bodies do not block usual chats
_FIELD = re.compile(r" - at `\$\.([^.\[`]+)")  # the field that msgspec's message names
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BodyReader:
    """Reads bodies, and counts the bytes of all unfinished ones."""

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config
        self.held_bytes = 0  # of unfinished bodies that are larger than SMALL_BODY_BYTES

    async def read(self, request: Request) -> bytes:
        """Read the whole body.

        Raises ApiError 413 if it is longer than `max_body_bytes`, without reading the rest; 503 if all large unfinished
        bodies together exceed `max_unfinished_bytes`; 400 if it has too many values; CallerLeft, also if the connection
        refused a slow body (protocol.py).
        """
        body = await self._read(request)
        _check_values(body, self._config.max_body_values)
        return bytes(body)

    async def _read(self, request: Request) -> bytearray:
        limit, body, more, counted = self._config.max_body_bytes, bytearray(), True, 0
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
                    self.held_bytes += len(body) - counted
                    counted = len(body)
                    if self.held_bytes > self._config.max_unfinished_bytes:
                        reason = "unfinished bodies exceed explorer.max_unfinished_bytes; try again"
                        raise unavailable(reason, "too_many_bodies")
        finally:
            self.held_bytes -= counted
        return body


def _check_values(body: bytearray, most: int) -> None:
    """Raise ApiError 400 for too many JSON values: decoding them blocks the event loop for long.

    Opening brackets and colons are counted. Numbers decode faster, so four commas count as one of them.
    """
    if len(body) > most and sum(map(body.count, (b"[", b"{", b":"))) + body.count(b",") // 4 > most:
        message = (
            f"the body has more than {most} opening brackets and colons, where four commas count as one "
            "(explorer.max_body_values)"
        )
        raise ApiError(400, message, code="body_too_complex")


def decode_body(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ApiError 400 for anything else, NaN and infinity included."""
    return decode_typed(raw, _decode_object)


def decode_typed(raw: bytes, decode: Callable[[bytes], T]) -> T:
    """Decode a JSON object by `decode`, a typed decoder. Raises ApiError 400 with the name of a wrong field.

    msgspec refuses numbers that are no finite float where a type is float, also integers of many digits.
    """
    try:
        return decode(raw)
    except msgspec.ValidationError as exc:
        field = _FIELD.search(str(exc))
        raise bad_request(str(exc), field and field[1]) from exc
    except NO_JSON as exc:
        raise bad_request(f"the body is not a JSON object: {exc}") from exc


def ignored_fields(raw: bytes, body: msgspec.Struct) -> list[str]:
    """Return the first fields of a JSON object that its decoded type does not have, such as misspelled ones.

    Raises ApiError 400: a typed decoder does not check the names of fields that it ignores.
    """
    given = decode_typed(raw, _decode_fields)
    return [name[:_LONGEST_SHOWN] for name in given if name not in body.__struct_fields__][:_MOST_SHOWN]


class while_caller_waits:
    """Cancel the block and raise CallerLeft if the caller closes its connection.

    Leave the block before the response's last part: a server also reports the end of a response as a disconnect.
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
        del self._watch  # a cancelled task's traceback refers to this object: a cycle would keep the request alive
        if self._left and kind is asyncio.CancelledError and not self._task.uncancel():
            raise CallerLeft from None

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
