"""Chat as a stream: every event goes on as it comes; the sample is recorded before the last one.

The engine's timing is the caller's: nothing is held back but the final `[DONE]`, which waits until the rows stand.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

from starlette.responses import Response

from explorer_service.answer import DONE, VERSION_HEADER, Lane, StreamAnswer
from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import engage, on_some_engine, read_whole
from explorer_service.errors import ApiError, unavailable
from explorer_service.record import record_or_fail
from explorer_service.request import Chat
from explorer_service.sampled import join_events
from explorer_service.strip import strip_event


async def stream_chat(chat: Chat, deps: Deps) -> Response:
    """Open the engine's stream; answer with its error, or with its events."""
    ask = chat.ask(deps.config.model.name)
    stack = AsyncExitStack()

    async def attempt(avoid: list[Engine]) -> tuple[Seat, Reply]:
        return await stack.enter_async_context(engage(ask, deps, avoid))

    try:
        stack.enter_context(chat.caller.limit.taken())
        if not deps.fleet.alone:
            await stack.enter_async_context(deps.fleet.streaming(chat.msg_id))
        seat, reply = await on_some_engine(attempt, deps)
        if reply.status != 200:
            content = await read_whole(reply, seat, deps)
            await stack.aclose()
            return Response(content, reply.status, media_type=reply.content_type)
    except BaseException:
        await stack.aclose()
        raise
    deps.in_flight.begin(chat.msg_id)
    stack.callback(deps.in_flight.end, chat.msg_id)
    headers = {VERSION_HEADER: str(seat.version), "Cache-Control": "no-cache"}
    return StreamAnswer(partial(_relay, reply, chat, seat, deps), stack, 200, headers)


async def _relay(reply: Reply, chat: Chat, seat: Seat, deps: Deps, lane: Lane) -> AsyncGenerator[bytes]:
    """The caller's events: each of the engine's goes by the lane as it comes, and `[DONE]` once the rows stand."""
    relay = _Relay(chat, seat, deps, lane)
    try:
        ended = False
        while not ended:
            ended = await reply.flow(relay.pass_on)
            await lane.clear()
            for event in relay.take_left():
                if event is DONE:
                    if chat.store:
                        await record_or_fail(join_events(relay.heard, chat, seat), deps.recorder)
                    yield DONE
                    return
                yield event
    except (ConnectionLost, TimeoutError) as exc:
        lost = unavailable(
            f"engine {seat.engine.name} broke off ({exc or type(exc).__name__}); try again", "engine_lost"
        )
        yield b"data: " + lost.body() + b"\n\n"
    except ApiError as error:  # the head is out already: say it in the stream, and leave [DONE] out
        yield b"data: " + error.body() + b"\n\n"


class _Relay:
    """Events on their way from the engine to the caller."""

    def __init__(self, chat: Chat, seat: Seat, deps: Deps, lane: Lane) -> None:
        self.heard: list[bytes] = []  # taken apart at the end, all at once, so that each event passes quickly
        self._chat = chat
        self._engine = seat.engine
        self._lane = lane
        self._first_token = deps.metrics.chat_first_token
        self._is_first = True
        self._rest = b""  # of an event whose end has not come
        self._left: list[bytes] = []  # events that the lane cannot take: after one that waits, and [DONE]

    def pass_on(self, data: bytes) -> bool:
        """Send the events that are whole now. False: some are left, or wait."""
        self._engine.answered_at = time.monotonic()
        if self._rest:
            data = self._rest + data
        lane, chat, start = self._lane, self._chat, 0
        while (end := data.find(b"\n\n", start)) >= 0:
            event, start = data[start : end + 2], end + 2
            if event == DONE:
                self._left.append(DONE)
                continue
            if chat.store:
                self.heard.append(event)
                event = strip_event(event, chat)
            if lane.is_free and not self._left:
                lane.offer(event)
            else:
                self._left.append(event)
        self._rest = data[start:]
        if self._is_first and start:
            self._is_first = False
            self._first_token.observe(time.perf_counter() - chat.started)
        return lane.is_free and not self._left

    def take_left(self) -> list[bytes]:
        """What is left to be sent after those that went."""
        left, self._left = self._left, []
        return left
