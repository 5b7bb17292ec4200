"""Routes that are served but not recorded: the engine returns no token ids for them, or samples nothing.

POST /v1/responses, /v1/messages (Anthropic's), /tokenize and /detokenize: replies have `X-Flywheel-Recorded: false`.
Bodies and streams are forwarded unchanged in both directions, except the model's name. While several versions have
shares of the chats, each request that samples gets one of them by its own id, whatever run or conversation it is of.
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
from explorer_service.engines.faults import message_of

_SAMPLE = ("/v1/responses", "/v1/messages")


async def answer_unrecorded(request: Request, deps: Deps) -> Response:
    """POST to one of the routes above."""
    caller = deps.auth.require(request, "chat")
    async with AsyncExitStack() as resources:
        resources.enter_context(caller.limit.taken())  # before the body is read or decoded
        body = decode_body(await deps.bodies.read(request))
        path, route, request_id = request.scope["path"], deps.router.choose(body.get("model")), uuid.uuid4().hex
        is_divided = deps.shares.divided and route.names_none and path in _SAMPLE
        forwarded = EngineRequest(
            path=path,
            body=body,
            request_id=request_id,
            version=route.version,
            preferred=await deps.shares.choose(request_id, None, None, ()) if is_divided else None,
            seeded=body.get("seed") is not None,
            unknown_model=route.unknown_model,
        )
        async with while_caller_waits(request.receive):
            return await _forward(forwarded, route.asked, deps, resources)


async def _forward(request: EngineRequest, name: str, deps: Deps, resources: AsyncExitStack) -> Response:
    """name: the model's name in the caller's request."""
    async with AsyncExitStack() as stack:
        exchange = await stack.enter_async_context(await deps.dispatcher.open(request))
        headers = {VERSION_HEADER: str(exchange.slot.version), RECORDED_HEADER: "false"}
        if exchange.content_type == "text/event-stream":
            resources.push_async_exit(stack.pop_all())
            events = exchange.chunks() if exchange.slot.model == name else _renamed(exchange, name)
            return _NamedEventStream(events, headers, resources.pop_all(), exchange.status)
        reply = await exchange.read()
        if reply.status >= 400 and not message_of(reply.content):  # such as 404 of an engine without this route
            raise ApiError(reply.status, f"the engine answered {request.path} with status {reply.status}")
        content = rename(reply.content, exchange.slot.model, name)
        return Response(content, reply.status, headers, media_type=reply.content_type)


async def _renamed(exchange: Exchange, name: str) -> AsyncIterator[bytes]:
    async for event in split_events(exchange.chunks()):
        yield rename(event, exchange.slot.model, name)


class _NamedEventStream(EventStream):
    """A stream of /v1/responses or /v1/messages: its events have names, also errors."""

    def error_event(self, error: ApiError) -> bytes:
        content = error.content()
        data = {"type": "error", "error": content, "code": content["code"], "message": content["message"]}
        return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
