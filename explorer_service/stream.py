"""Chat as a stream: every event goes on as it comes; the sample is recorded before the last one.

The engine's timing is the caller's: nothing is held back but the final `[DONE]`, which waits until the rows stand.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw
from starlette.responses import Response

from explorer_service.answer import DONE, Lane, StreamAnswer
from explorer_service.chat import VERSION_HEADER, record_or_fail
from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import engage, on_some_engine, read_whole
from explorer_service.errors import ApiError, unavailable
from explorer_service.request import Chat
from explorer_service.sampled import EMPTY, NULL, Sampled, decode_choices, decode_ids, decode_raw, strip


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
                        await record_or_fail(relay.heard.samples(seat), deps)
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
        self.heard = Heard(chat)
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
        data = self._rest + data
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            self._send(data[start : end + 2])
            start = end + 2
        self._rest = data[start:]
        return self._lane.is_free and not self._left

    def _send(self, event: bytes) -> None:
        if event == DONE:
            self._left.append(DONE)
            return
        if self._is_first:
            self._first_token.observe(time.perf_counter() - self._chat.started)
            self._is_first = False
        if self._chat.store:
            event = self.heard.take(event)
        if self._lane.is_free and not self._left:
            self._lane.offer(event)
        else:
            self._left.append(event)

    def take_left(self) -> list[bytes]:
        """What is left to be sent after those that went."""
        left, self._left = self._left, []
        return left


_LOGPROBS, _AFTER_LOGPROBS = b'"logprobs":{', b'},"finish_reason":'
_IDS = b'token_ids":['


class Heard:
    """What a stream has said so far: taken apart at its end, all at once, so that each event passes quickly."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._events: list[bytes] = []

    def take(self, event: bytes) -> bytes:
        """Keep an event; return it as the caller gets it."""
        self._events.append(event)
        return strip_event(event, self._chat)

    def samples(self, seat: Seat) -> list[Any]:
        """A sample for each choice that was heard. Raises ApiError 503 for events that are no chat completion's."""
        prompt_ids: list[int] = []
        choices: dict[int, Sampled] = {}
        messages: dict[int, dict[str, Any]] = {}
        try:
            for event in self._events:
                chunk = _decode(event)
                prompt_ids = decode_ids(chunk.get("prompt_token_ids", NULL)) or prompt_ids
                for choice in decode_choices(chunk.get("choices", EMPTY)):
                    index = int(bytes(choice["index"]))
                    choices.setdefault(index, Sampled([])).add(choice)
                    _merge_delta(messages.setdefault(index, {}), _delta(choice))
        except (msgspec.DecodeError, KeyError, ValueError) as exc:
            raise unavailable(f"engine {seat.engine.name} streamed what is no chat completion", "engine_reply") from exc
        samples = []
        for index, sampled in sorted(choices.items()):
            sampled.prompt_ids = sampled.prompt_ids or prompt_ids
            sampled.reply = json.dumps(messages[index], ensure_ascii=False).encode()
            samples.append(sampled.sample(index, self._chat, seat))
        return samples


def strip_event(event: bytes, chat: Chat) -> bytes:
    """An event without what the caller did not ask for.

    Cut out where vLLM writes it; in a string every quote is escaped, so that nothing the model said can look like it.
    What is written otherwise is taken apart.
    """
    stripped = event
    if not chat.keep_logprobs:
        while (start := stripped.find(_LOGPROBS)) >= 0 and (end := stripped.find(_AFTER_LOGPROBS, start)) >= 0:
            stripped = stripped[:start] + b'"logprobs":null' + stripped[end + 1 :]
    if not chat.keep_token_ids:
        while (start := stripped.find(_IDS)) >= 0 and (end := stripped.find(b"]", start)) >= 0:
            stripped = stripped[:start] + b'token_ids":null' + stripped[end + 1 :]
    left = b"" if chat.keep_logprobs else stripped
    if _LOGPROBS in left or b'"logprobs": {' in left:
        return _strip_decoded(event, chat)
    left = b"" if chat.keep_token_ids else stripped
    if _IDS in left or b'token_ids": [' in left:
        return _strip_decoded(event, chat)
    return stripped


def _decode(event: bytes) -> dict[str, Raw]:
    return decode_raw(event[6:-2]) if event.startswith(b"data: {") else {}


def _strip_decoded(event: bytes, chat: Chat) -> bytes:
    """The thorough way, for what the pattern does not know."""
    chunk = _decode(event)
    if "choices" not in chunk:  # an error the engine found on the way
        return event
    choices = decode_choices(chunk["choices"])
    for choice in choices:
        strip(choice, chat)
    if not chat.keep_token_ids and "prompt_token_ids" in chunk:
        chunk["prompt_token_ids"] = NULL
    chunk["choices"] = Raw(msgspec.json.encode(choices))
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _delta(choice: dict[str, Raw]) -> dict[str, Any]:
    """What a chunk adds to the message; a plain completion's text is its content."""
    if "text" in choice:
        return {"content": msgspec.json.decode(choice["text"])}
    return msgspec.json.decode(choice.get("delta", NULL)) or {}


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message: texts are joined, tool calls are joined by their index, the rest is set."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value or []:
                while len(calls) <= part.get("index", 0):
                    calls.append({})
                _merge_delta(calls[part.get("index", 0)], {k: v for k, v in part.items() if k != "index"})
        elif isinstance(value, dict):
            _merge_delta(message.setdefault(name, {}), value)
        elif isinstance(value, str) and name in ("content", "reasoning", "reasoning_content", "arguments", "refusal"):
            message[name] = (message.get(name) or "") + value
        elif value is not None or name not in message:
            message[name] = value
