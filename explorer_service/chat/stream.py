"""Relay a chat as a stream, and record its sample before its end.

Every event is forwarded as it arrives, except the end: the event that finishes the last choice, and all that follow,
wait until the rows are stored. So a caller that reads no further than the finish reason may leave, or send feedback.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from explorer_service.api.body import while_caller_waits
from explorer_service.api.errors import ApiError, as_api_error
from explorer_service.chat.capture import capture_events, require_own_id
from explorer_service.chat.redact import redact, rename
from explorer_service.chat.request import ChatRequest
from explorer_service.deps import Deps
from explorer_service.engines.dispatch import Exchange
from explorer_service.engines.slot import EngineSlot
from explorer_service.errors import InvalidReply
from shared.ledger.transitions import RunName

DONE = b"data: [DONE]\n\n"
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"[^"]')  # JSON escapes every quote in a string: no text matches
VERSION_HEADER = "X-Flywheel-Version"
RECORDED_HEADER = "X-Flywheel-Recorded"


async def open_stream(chat: ChatRequest, deps: Deps, resources: AsyncExitStack) -> Response:
    """Open the engine's stream, and answer with its events or its error.

    resources: what the request holds; a stream takes them over, and frees them at its end.
    """
    async with AsyncExitStack() as stack:
        if chat.recorded:
            attribution = chat.attribution
            run = RunName(attribution.task_id, attribution.run_id, attribution.caller.group)
            await stack.enter_async_context(deps.open_streams.opened(chat.msg_id, run))
        exchange = await stack.enter_async_context(await deps.dispatcher.open(chat.engine_request()))
        if exchange.status != 200:
            reply = await exchange.read()
            return Response(reply.content, reply.status, media_type=reply.content_type)
        headers = {**describe(chat, exchange.slot), "Cache-Control": "no-cache"}
        resources.push_async_exit(stack.pop_all())
        return EventStream(relay(exchange, chat, deps), headers, resources.pop_all())


def describe(chat: ChatRequest, slot: EngineSlot) -> dict[str, str]:
    """Return the headers that name the version that answered, and tell if the reply is not recorded."""
    version = {VERSION_HEADER: str(slot.version)}
    return version if chat.recorded else {**version, RECORDED_HEADER: "false"}


async def relay(exchange: Exchange, chat: ChatRequest, deps: Deps) -> AsyncIterator[bytes]:
    """Yield the engine's events as they arrive, and the end once the rows are stored.

    Raises InvalidReply, EngineLost.
    """
    captured: list[bytes] = []
    waiting: list[bytes] = []  # events that the caller has not got
    event, unfinished = b"", chat.choices
    is_first, model, asked = True, exchange.slot.model, chat.route.asked
    async for event in split_events(exchange.chunks()):
        if is_first:
            is_first = False
            deps.metrics.chat_first_token.observe(time.perf_counter() - chat.received_at)
            require_own_id(event, chat, exchange.slot)
        if not chat.recorded and b'"abort"' in event:
            capture_events([event], chat, exchange.slot)  # raises if that is the finish reason
        if chat.recorded and event == DONE:
            await deps.writer.record(capture_events(captured, chat, exchange.slot))
        elif chat.recorded:
            captured.append(event)
            unfinished -= len(_FINISH_REASON.findall(event))
        if shown := redact(event, chat):
            waiting.append(rename(shown, model, asked))
        if unfinished > 0 or event == DONE:
            for shown in waiting:
                yield shown
            waiting.clear()
    if chat.recorded and event != DONE:
        raise InvalidReply(f"engine {exchange.slot.engine.name} ended a stream without [DONE]")


async def split_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole server-sent events, each with the empty line that ends it."""
    rest: list[bytes] = []  # parts of an unfinished event, joined only once
    async for chunk in chunks:
        if b"\n\n" not in chunk and not (chunk.startswith(b"\n") and rest and rest[-1].endswith(b"\n")):
            rest.append(chunk)
            continue
        *events, last = (b"".join(rest) + chunk).split(b"\n\n")
        rest = [last] if last else []
        for event in events:
            yield event + b"\n\n"


class EventStream(Response):
    """A response of server-sent events.

    Owns the stream's resources (the key's place, the engine slot), and frees them at the end of the stream or when the
    caller leaves. An error after the head was sent is reported in an event, and `[DONE]` is omitted.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str], resources: AsyncExitStack, status: int = 200
    ) -> None:
        self.status_code = status
        self.background = None
        self.init_headers(headers)
        self._events = events
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        try:
            async with self._resources:  # an error also closes the engine's connection
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with while_caller_waits(receive):
                    async for event in self._events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            answer = as_api_error(error)
            if answer is None:  # the caller left, or a bug: the server logs it and closes the connection
                raise
            last = self.error_event(answer)
        await send({"type": "http.response.body", "body": last})

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"
