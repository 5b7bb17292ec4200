"""Surfaces that are served and not recorded: the engine gives no token ids for them, or samples nothing.

POST /v1/responses and /v1/messages (Anthropic's) answer with `X-Flywheel-Recorded: false`; /tokenize and /detokenize
sample nothing. Bodies and streams pass as they are, but for the model's name, on the way there and back.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.body import decode_body, while_caller_waits
from explorer_service.api.errors import ApiError
from explorer_service.chat.redact import rename
from explorer_service.chat.stream import RECORDED_HEADER, VERSION_HEADER, EventStream, split_events
from explorer_service.deps import Deps
from explorer_service.engines.dispatch import EngineRequest, Exchange


async def answer_unrecorded(request: Request, deps: Deps) -> Response:
    """POST one of the surfaces above."""
    caller = deps.auth.require(request, "chat")
    async with AsyncExitStack() as resources:
        resources.enter_context(caller.limit.taken())  # before anything is read or decoded
        body = decode_body(await deps.bodies.read(request))
        route = deps.router.choose(body.get("model"))
        seeded = body.get("seed") is not None
        path, unknown = request.scope["path"], route.unknown_model
        asked = EngineRequest(path, body, uuid.uuid4().hex, route.version, seeded, unknown_model=unknown)
        async with while_caller_waits(request.receive):
            return await _forward(asked, route.asked, deps, resources)


async def _forward(request: EngineRequest, name: str, deps: Deps, resources: AsyncExitStack) -> Response:
    """name: the model's, as the caller gave it."""
    async with AsyncExitStack() as stack:
        exchange = await stack.enter_async_context(await deps.dispatcher.open(request))
        headers = {VERSION_HEADER: str(exchange.slot.version), RECORDED_HEADER: "false"}
        if exchange.content_type == "text/event-stream":
            resources.push_async_exit(stack.pop_all())
            events = exchange.chunks() if exchange.slot.model == name else _renamed(exchange, name)
            return _NamedEventStream(events, headers, resources.pop_all(), exchange.status)
        reply = await exchange.read()
        content = rename(reply.content, exchange.slot.model, name)
        return Response(content, reply.status, headers, media_type=reply.content_type)


async def _renamed(exchange: Exchange, name: str) -> AsyncIterator[bytes]:
    async for event in split_events(exchange.chunks()):
        yield rename(event, exchange.slot.model, name)


class _NamedEventStream(EventStream):
    """The streams of /v1/responses and /v1/messages name their events, errors too."""

    def error_event(self, error: ApiError) -> bytes:
        content = error.content()
        data = {"type": "error", "error": content, "code": content["code"], "message": content["message"]}
        return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
