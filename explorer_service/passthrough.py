"""Surfaces that are served and not recorded: the engine gives no token ids for them, or samples nothing.

POST /v1/responses and /v1/messages (Anthropic's) answer with `X-Flywheel-Recorded: false`; /tokenize and /detokenize
sample nothing. Bodies and streams pass as they are, but for the model's name.
"""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack

import msgspec
from starlette.responses import Response

from explorer_service.call import VERSION_HEADER, Call
from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.upstream import Ask, engage_within, read_whole
from explorer_service.request import decode_body

RECORDED_HEADER = "X-Flywheel-Recorded"


async def answer_unrecorded(call: Call, deps: Deps) -> None:
    """POST one of the surfaces above."""
    caller = deps.auth.require(call, "chat")
    body = decode_body(await call.read(deps.config.explorer))
    pin = deps.router.parse(body.get("model"))
    data = msgspec.json.encode({**body, "model": deps.config.model.name})
    ask = Ask(call.path, data, uuid.uuid4().hex, pin, seeded=body.get("seed") is not None)
    async with AsyncExitStack() as stack:
        stack.enter_context(caller.limit.taken())

        seat, reply = await engage_within(stack, ask, deps)
        headers = {VERSION_HEADER: str(seat.version), RECORDED_HEADER: "false"}
        if reply.content_type == "text/event-stream":
            await _pass_on(reply, call, headers)
        else:
            content = await read_whole(reply, seat, deps)
            call.answer(Response(content, reply.status, headers, media_type=reply.content_type))


async def _pass_on(reply: Reply, call: Call, headers: dict[str, str]) -> None:
    """A stream, as it comes."""
    call.begin(reply.status, headers)
    try:
        while chunk := await reply.read_some():
            call.send(chunk)
            await call.drain()
        call.end()
    except (ConnectionLost, TimeoutError):
        call.break_off()
