"""Surfaces that are served and not recorded: the engine gives no token ids for them, or samples nothing.

POST /v1/responses and /v1/messages (Anthropic's) answer with `X-Flywheel-Recorded: false`; /tokenize and /detokenize
sample nothing. Bodies and streams pass as they are, but for the model's name.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.answer import VERSION_HEADER, CallerStays, Lane, StreamAnswer
from explorer_service.deps import Deps
from explorer_service.engines.connection import Reply
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import Ask, engage, on_some_engine, read_whole
from explorer_service.request import decode_body, read_body

RECORDED_HEADER = "X-Flywheel-Recorded"


async def answer_unrecorded(request: Request, deps: Deps) -> Response:
    """POST one of the surfaces above."""
    caller = deps.auth.require(request, "chat")
    body = decode_body(await read_body(request, deps.config.explorer))
    pin = deps.router.parse(body.get("model"))
    data = msgspec.json.encode({**body, "model": deps.config.model.name})
    seeded = body.get("seed") is not None
    ask = Ask(request.url.path, data, uuid.uuid4().hex, pin, seeded)
    stack = AsyncExitStack()
    try:
        stack.enter_context(caller.limit.taken())
        with CallerStays(request.receive):
            return await _answer(ask, stack, deps)
    except BaseException:
        await stack.aclose()
        raise


async def _answer(ask: Ask, stack: AsyncExitStack, deps: Deps) -> Response:
    async def attempt(avoid: list[Engine]) -> tuple[Seat, Reply]:
        return await stack.enter_async_context(engage(ask, deps, avoid))

    seat, reply = await on_some_engine(attempt, deps)
    headers = {VERSION_HEADER: str(seat.version), RECORDED_HEADER: "false"}
    if reply.content_type != "text/event-stream":
        content = await read_whole(reply, seat, deps)
        await stack.aclose()
        return Response(content, reply.status, headers, media_type=reply.content_type)

    async def chunks(_lane: Lane) -> AsyncGenerator[bytes]:
        while chunk := await reply.read_some():
            yield chunk

    return StreamAnswer(chunks, stack, reply.status, headers)
