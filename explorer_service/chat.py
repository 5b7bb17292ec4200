"""Stage 1, chat: an OpenAI request goes to an engine; token ids and the sampler's own logprobs come back.

Two surfaces: chat completions, and plain completions. The request goes on as the caller wrote it, with two fields
added; the reply comes back as the engine wrote it, with what the caller did not ask for taken out. Between the two the
sample is recorded (stage 2).
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from explorer_service.answer import VERSION_HEADER, CallerStays
from explorer_service.deps import Deps
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import engage, on_some_engine, read_whole
from explorer_service.record import record_or_fail
from explorer_service.request import CHAT, COMPLETION, Chat, Surface, parse_chat, read_body
from explorer_service.sampled import split_reply
from explorer_service.stream import stream_chat
from shared.experience import Sample


async def answer_chat(request: Request, deps: Deps) -> Response:
    """POST /v1/chat/completions and POST /chat."""
    return await _answer(CHAT, request, deps)


async def answer_completion(request: Request, deps: Deps) -> Response:
    """POST /v1/completions."""
    return await _answer(COMPLETION, request, deps)


async def _answer(surface: Surface, request: Request, deps: Deps) -> Response:
    caller = deps.auth.require(request, "chat")
    raw = await read_body(request, deps.config.explorer)
    chat = parse_chat(surface, raw, request, deps, caller)
    if chat.stream:
        return await stream_chat(chat, deps)
    with caller.limit.taken(), CallerStays(request.receive):
        return await _answer_whole(chat, deps)


async def _answer_whole(chat: Chat, deps: Deps) -> Response:
    """Not a stream: record what was sampled, then answer."""
    ask = chat.ask(deps.config.model.name)

    async def attempt(avoid: list[Engine]) -> tuple[Response, list[Sample], Seat]:
        async with engage(ask, deps, avoid) as (seat, reply):
            content = await read_whole(reply, seat, deps)
            if reply.status != 200:
                return Response(content, reply.status, media_type=reply.content_type), [], seat
            content, samples = split_reply(content, chat, seat) if chat.store else (content, [])
            headers = {VERSION_HEADER: str(seat.version)}
            return Response(content, 200, headers, media_type="application/json"), samples, seat

    response, samples, seat = await on_some_engine(attempt, deps)
    await record_or_fail(samples, deps.recorder)
    deps.metrics.chat_added.observe(time.perf_counter() - chat.started - seat.engine_s)
    return response
