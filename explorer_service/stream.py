"""Chat as a stream: every event goes on as it comes; the sample is recorded before the last one.

The engine's timing is the caller's: nothing is held back but the final `[DONE]`, which waits until the rows stand.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from msgspec import Raw
from starlette.responses import Response

from explorer_service.answer import DONE, StreamAnswer
from explorer_service.chat import VERSION_HEADER, record_or_fail
from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import engage, on_some_engine, read_whole
from explorer_service.errors import ApiError, unavailable
from explorer_service.request import Chat
from explorer_service.sampled import NULL, Sampled, decode_choices, decode_ids, decode_raw, strip


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

    async def events() -> AsyncGenerator[bytes]:
        try:
            async with stack:
                async for event in _relay(reply, chat, seat, deps):
                    yield event
        finally:
            deps.in_flight.end(chat.msg_id)

    return StreamAnswer(events(), 200, {VERSION_HEADER: str(seat.version), "Cache-Control": "no-cache"})


async def _relay(reply: Reply, chat: Chat, seat: Seat, deps: Deps) -> AsyncGenerator[bytes]:
    """The caller's events: each of the engine's as it comes, and `[DONE]` once the rows stand."""
    heard = Heard(chat)
    rest = b""
    first = True
    try:
        while chunk := await reply.read_some():
            rest += chunk
            while (end := rest.find(b"\n\n") + 2) > 1:
                event, rest = rest[:end], rest[end:]
                if event == DONE:
                    if chat.store:
                        await record_or_fail(heard.samples(seat), deps)
                    yield DONE
                    return
                if first:
                    deps.metrics.chat_first_token.observe(time.perf_counter() - chat.started)
                    first = False
                yield heard.take(event) if chat.store else event
    except (ConnectionLost, TimeoutError) as exc:
        lost = unavailable(
            f"engine {seat.engine.name} broke off ({exc or type(exc).__name__}); try again", "engine_lost"
        )
        yield b"data: " + lost.body() + b"\n\n"
    except ApiError as error:  # the head is out already: say it in the stream, and leave [DONE] out
        yield b"data: " + error.body() + b"\n\n"


class Heard:
    """What a stream has said so far, for each choice."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._prompt_ids: list[int] = []
        self._choices: dict[int, Sampled] = {}
        self._messages: dict[int, dict[str, Any]] = {}

    def take(self, event: bytes) -> bytes:
        """Note an event's tokens; return it as the caller gets it."""
        if not event.startswith(b"data: {"):
            return event
        chunk = decode_raw(event[6:-2])
        if "choices" not in chunk:  # an error the engine found on the way
            return event
        chat = self._chat
        self._prompt_ids = decode_ids(chunk.get("prompt_token_ids", NULL)) or self._prompt_ids
        choices = decode_choices(chunk["choices"])
        for choice in choices:
            index = int(bytes(choice["index"]))
            sampled = self._choices.setdefault(index, Sampled([]))
            sampled.add(choice)
            _merge_delta(self._messages.setdefault(index, {}), _delta(choice))
            strip(choice, chat)
        if not chat.keep_token_ids and "prompt_token_ids" in chunk:
            chunk["prompt_token_ids"] = NULL
        chunk["choices"] = Raw(msgspec.json.encode(choices))
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def samples(self, seat: Seat) -> list[Any]:
        """A sample for each choice that was heard to its end."""
        samples = []
        for index, sampled in sorted(self._choices.items()):
            sampled.prompt_ids = sampled.prompt_ids or self._prompt_ids
            sampled.reply = json.dumps(self._messages[index], ensure_ascii=False).encode()
            samples.append(sampled.sample(index, self._chat, seat))
        return samples


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
