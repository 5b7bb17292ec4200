"""Chat as a stream: every event goes on as it comes; the sample is recorded before the last one.

The engine's timing is the caller's: nothing is held back but the final `[DONE]`, which waits until the rows stand.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from starlette.responses import Response

from explorer_service.call import VERSION_HEADER, Call
from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.pool import Seat
from explorer_service.engines.upstream import engage_within, read_whole
from explorer_service.errors import ApiError, unavailable
from explorer_service.record import record_or_fail
from explorer_service.request import Chat
from explorer_service.sampled import join_events
from explorer_service.strip import strip_event

DONE = b"data: [DONE]\n\n"


async def stream_chat(chat: Chat, call: Call, deps: Deps) -> None:
    """Open the engine's stream; answer with its error, or with its events."""
    ask = chat.ask(deps.config.model.name)
    async with AsyncExitStack() as stack:
        if not deps.fleet.alone:
            await stack.enter_async_context(deps.fleet.streaming(chat.msg_id))
        seat, reply = await engage_within(stack, ask, deps)
        if reply.status != 200:
            content = await read_whole(reply, seat, deps)
            call.answer(Response(content, reply.status, media_type=reply.content_type))
            return
        deps.in_flight.begin(chat.msg_id)
        stack.callback(deps.in_flight.end, chat.msg_id)
        call.begin(200, {VERSION_HEADER: str(seat.version), "Cache-Control": "no-cache"})
        await _relay(reply, chat, seat, call, deps)


async def _relay(reply: Reply, chat: Chat, seat: Seat, call: Call, deps: Deps) -> None:
    """Each of the engine's events goes on as it comes, and `[DONE]` once the rows stand."""
    relay = _Relay(chat, seat, call, deps)
    try:
        ended = False
        while not ended:
            ended = await reply.flow(relay.pass_on)
            await call.drain()
            for event in relay.take_left():
                if event is DONE:
                    if chat.store:
                        await record_or_fail(join_events(relay.heard, chat, seat), deps.recorder)
                    call.end(DONE)
                    return
                call.send(event)
                await call.drain()
    except (ConnectionLost, TimeoutError) as exc:
        reason = f"engine {seat.engine.name} broke off ({exc or type(exc).__name__}); try again"
        call.send(b"data: " + unavailable(reason, "engine_lost").body() + b"\n\n")
    except ApiError as error:  # the head is out already: say it in the stream, and leave [DONE] out
        call.send(b"data: " + error.body() + b"\n\n")
    call.end()


class _Relay:
    """Events on their way from the engine to the caller."""

    def __init__(self, chat: Chat, seat: Seat, call: Call, deps: Deps) -> None:
        self.heard: list[bytes] = []  # taken apart at the end, all at once, so that each event passes quickly
        self._chat = chat
        self._engine = seat.engine
        self._call = call
        self._first_token = deps.metrics.chat_first_token
        self._is_first = True
        self._rest = b""  # of an event whose end has not come
        self._left: list[bytes] = []  # events that wait for the caller to keep up, and [DONE]

    def pass_on(self, data: bytes) -> bool:
        """Send the events that are whole now. False: some are left, or wait."""
        self._engine.answered_at = time.monotonic()
        if self._rest:
            data = self._rest + data
        call, chat, start = self._call, self._chat, 0
        while (end := data.find(b"\n\n", start)) >= 0:
            event, start = data[start : end + 2], end + 2
            if event == DONE:
                self._left.append(DONE)
                continue
            if chat.store:
                self.heard.append(event)
                event = strip_event(event, chat)
            if call.is_free and not self._left:
                call.send(event)
            else:
                self._left.append(event)
        self._rest = data[start:]
        if self._is_first and start:
            self._is_first = False
            self._first_token.observe(time.perf_counter() - chat.started)
        return call.is_free and not self._left

    def take_left(self) -> list[bytes]:
        """What is left to be sent after those that went."""
        left, self._left = self._left, []
        return left
