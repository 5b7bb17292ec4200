"""Stage 1, chat: send an OpenAI request to an engine, which returns token ids and the sampler's own logprobs.

Two surfaces: chat completions and plain completions. The engine gets the caller's request with two fields added; the
caller gets the engine's reply without the values that it did not request. The sample is recorded first (stage 2).
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.body import while_caller_waits
from explorer_service.chat.capture import capture_reply
from explorer_service.chat.redact import redact, rename
from explorer_service.chat.request import CHAT, COMPLETION, ChatRequest, Surface, parse_chat
from explorer_service.chat.stream import describe, open_stream
from explorer_service.deps import Deps


async def answer_chat(request: Request, deps: Deps) -> Response:
    """POST /v1/chat/completions and POST /chat, also below /run/TASK/RUN."""
    return await _answer(CHAT, request, deps)


async def answer_completion(request: Request, deps: Deps) -> Response:
    """POST /v1/completions, also below /run/TASK/RUN."""
    return await _answer(COMPLETION, request, deps)


async def _answer(surface: Surface, request: Request, deps: Deps) -> Response:
    caller = deps.auth.require(request, "chat")
    async with AsyncExitStack() as resources:
        resources.enter_context(caller.limit.taken())  # before the body is read or decoded
        raw = await deps.bodies.read(request)
        names, now = request.path_params, deps.membership.now()
        chat = parse_chat(surface, raw, request.headers, caller, deps.router, deps.config, names, now)
        if deps.shares.divided and chat.route.names_none:
            chat = await _choose_version(chat, deps)
        async with while_caller_waits(request.receive):
            if chat.stream:
                return await open_stream(chat, deps, resources)
            return await _answer_whole(chat, deps)


async def _choose_version(chat: ChatRequest, deps: Deps) -> ChatRequest:
    """Choose one of the versions among which an operator has divided the chats."""
    of = chat.attribution
    return replace(chat, preferred=await deps.shares.choose(chat.msg_id, of.task_id, of.run_id, of.extends))


async def _answer_whole(chat: ChatRequest, deps: Deps) -> Response:
    """Answer a request that is not a stream: record the samples, then send the reply."""
    reply, samples = await deps.dispatcher.fetch(chat.engine_request(), partial(capture_reply, chat))
    if reply.status != 200:
        return Response(reply.content, reply.status, media_type=reply.content_type)
    await deps.writer.record(samples)
    deps.metrics.chat_added.observe(time.perf_counter() - chat.received_at - reply.engine_s)
    headers = describe(chat, reply.slot)
    content = rename(redact(reply.content, chat), reply.slot.model, chat.route.asked)
    return Response(content, 200, headers, media_type="application/json")
