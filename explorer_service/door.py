"""The way in: what goes to engines is answered below ASGI, everything else by the FastAPI app.

uvicorn's protocol reads, parses, keeps connections alive and ends them; here it only hands on some requests otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from explorer_service.call import Call
from explorer_service.chat import answer_chat, answer_completion
from explorer_service.deps import Deps
from explorer_service.passthrough import answer_unrecorded

Handler = Callable[[Call, Deps], Awaitable[None]]

ENGINE_ROUTES: dict[bytes, Handler] = {  # all of them POST
    b"/v1/chat/completions": answer_chat,
    b"/chat": answer_chat,
    b"/v1/completions": answer_completion,
    b"/v1/responses": answer_unrecorded,
    b"/v1/messages": answer_unrecorded,
    b"/tokenize": answer_unrecorded,
    b"/detokenize": answer_unrecorded,
}


_HEAD_BYTES = 4096
_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n|\Z)", re.IGNORECASE)


class Door(HttpToolsProtocol):
    """One caller's connection.

    Java's HTTP client offers HTTP/2 (`Upgrade: h2c`) with its first request. uvicorn's parser takes whatever follows
    such a head for the other protocol, so that the body is lost; a server may pass over the offer (RFC 9110, 7.8).
    """

    cycle: Any  # of a request and its response: one of uvicorn's own, or a Call in its place
    scope: Any

    def data_received(self, data: bytes) -> None:
        if data.find(b"h2c", 0, _HEAD_BYTES) >= 0 and (self.cycle is None or not self.cycle.more_body):
            head, end, body = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"", head) + end + body
        super().data_received(data)

    def on_headers_complete(self) -> None:
        path = self.url if self.url in ENGINE_ROUTES else unquote_to_bytes(httptools.parse_url(self.url).path or b"")
        handler = ENGINE_ROUTES.get(path) if self.parser.get_method() == b"POST" else None
        if handler is None or (self.parser.should_upgrade() and self._should_upgrade()):
            super().on_headers_complete()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        before, self.cycle = self.cycle, Call(self.scope, path.decode(), handler, self, keep_alive=keep_alive)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # sent before the last answer was there
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
