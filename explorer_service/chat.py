"""Stage 1, chat: an OpenAI request goes to an engine; token ids and the sampler's own logprobs come back.

Two surfaces: chat completions, and plain completions. The request goes on as the caller wrote it, with two fields
added; the reply comes back as the engine wrote it, with what the caller did not ask for taken out. Between the two the
sample is recorded (stage 2).
"""

from __future__ import annotations

import time

from starlette.responses import Response

from explorer_service.call import VERSION_HEADER, Call
from explorer_service.deps import Deps
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import Engagement, on_some_engine, read_whole
from explorer_service.errors import ApiError
from explorer_service.record import record_or_fail
from explorer_service.request import CHAT, COMPLETION, Chat, Surface, parse_chat
from explorer_service.sampled import split_reply
from explorer_service.stream import stream_chat
from shared.experience import Sample


async def answer_chat(call: Call, deps: Deps) -> None:
    """POST /v1/chat/completions and POST /chat."""
    await _answer(CHAT, call, deps)


async def answer_completion(call: Call, deps: Deps) -> None:
    """POST /v1/completions."""
    await _answer(COMPLETION, call, deps)


async def _answer(surface: Surface, call: Call, deps: Deps) -> None:
    started = time.perf_counter()
    try:
        caller = deps.auth.require(call, "chat")
        raw = await call.read(deps.config.explorer)
        chat = parse_chat(surface, raw, call, deps, caller)
        with caller.limit.taken():
            await (stream_chat if chat.stream else _answer_whole)(chat, call, deps)
    except ApiError as error:
        call.fail(error)
    finally:
        deps.metrics.count_answer(call.status, time.perf_counter() - started)


async def _answer_whole(chat: Chat, call: Call, deps: Deps) -> None:
    """Not a stream: record what was sampled, then answer."""
    ask = chat.ask(deps.config.model.name)

    async def attempt(avoid: list[Engine]) -> tuple[Response, list[Sample], Seat]:
        async with Engagement(ask, deps, avoid) as (seat, reply):
            content = await read_whole(reply, seat, deps)
            if reply.status != 200:
                return Response(content, reply.status, media_type=reply.content_type), [], seat
            content, samples = split_reply(content, chat, seat) if chat.store else (content, [])
            headers = {VERSION_HEADER: str(seat.version)}
            return Response(content, 200, headers, media_type="application/json"), samples, seat

    response, samples, seat = await on_some_engine(attempt, deps)
    await record_or_fail(samples, deps.recorder)
    call.answer(response)
    deps.metrics.chat_added.observe(time.perf_counter() - chat.started - seat.engine_s)
