"""The short chats of benchmarks/reload show what those who chat meanwhile get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from benchmarks.reload import turn as turns
from benchmarks.reload.__main__ import within_bounds
from benchmarks.reload.figures import as_json, summarize
from benchmarks.reload.turn import Callers, Turn

PAUSE_S = 0.4
STEP_S = 0.005


class FakeEngine:
    """An engine that answers a token each step, and can be paused between two steps."""

    def __init__(self, short: str = "whole") -> None:
        """short: what happens to short chats: "whole", "error" after the first token, or "refused"."""
        self._short = short
        self._runs = asyncio.Event()
        self._runs.set()
        self._first_token = asyncio.Event()  # of a short chat
        self.version = 1

    @contextlib.asynccontextmanager
    async def callers(self) -> AsyncIterator[Callers]:
        """Its callers, while it serves."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with contextlib.aclosing(Callers(f"http://127.0.0.1:{runner.addresses[0][1]}")) as callers:
            yield callers
        await runner.cleanup()

    async def pause(self) -> int:
        """Pause when a short chat has its first token, and serve the next version after PAUSE_S."""
        self._first_token.clear()
        await self._first_token.wait()
        self._runs.clear()
        await asyncio.sleep(PAUSE_S)
        self.version += 1
        self._runs.set()
        return self.version

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        tokens = (await request.json())["max_tokens"]
        is_short = tokens < turns.TOKENS
        if is_short and self._short == "refused":
            return web.Response(status=503, text="no engine")
        await self._runs.wait()
        reply = web.StreamResponse(headers={"X-Flywheel-Version": str(self.version)})
        await reply.prepare(request)
        for number in range(tokens):
            await self._runs.wait()
            if is_short and number and self._short == "error":
                await reply.write(b'data: {"error": {"message": "engine lost"}}\n\n')
                break
            event = {"id": "m", "choices": [{"token_ids": [1]}]}
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if is_short and number == 0:
                self._first_token.set()
            await asyncio.sleep(STEP_S)
        return reply


def run(short: str = "whole", happens: bool = False, chats: int = 5) -> Turn:
    async def one() -> Turn:
        engine = FakeEngine(short)
        async with engine.callers() as callers:
            return await callers.turn(2, engine.pause if happens else None, chats)

    return asyncio.run(one())


def test_a_short_chat_comes_during_a_pause_that_begins_after_the_first_token_of_another():
    found = run(happens=True)
    assert found.published == 2
    assert max(chat.first_token_s for chat in found.late) >= PAUSE_S - 2 * turns.LATE_EVERY_S


def test_short_chats_come_at_a_fixed_rate_also_while_those_before_wait():
    found = run(happens=True)
    waited = [chat for chat in found.late if chat.first_token_s > turns.LATE_EVERY_S]
    assert len(waited) >= PAUSE_S / turns.LATE_EVERY_S - 2
    assert len({round(chat.first_token_at - chat.first_token_s, 3) for chat in found.late}) == len(found.late)


def test_a_turn_without_a_reload_sends_as_many_short_chats_as_it_is_told():
    assert len(run(chats=7).late) == 7


@pytest.mark.parametrize("short", ["error", "refused"])
def test_short_chats_that_fail_are_counted_and_the_figures_stay_json(short):
    figures = as_json(summarize([run(short)], {"m": [1] * turns.TOKENS}))
    json.dumps(figures, allow_nan=False)
    assert (figures["late_chats"], figures["late_failed"], figures["failed"]) == (5, 5, 5)
    assert (figures["late_first_token_ms"]["max"] is None) == (short == "refused")


def test_a_turn_ends_and_is_outside_its_bounds_if_no_short_chat_is_answered(monkeypatch):
    monkeypatch.setattr(turns, "LATE_LIMIT_S", 0.5)

    async def one() -> Turn:
        async with FakeEngine("refused").callers() as callers:
            return await callers.turn(2, lambda: asyncio.sleep(0, 2))

    found = asyncio.run(one())
    assert found.published == 2
    shares = as_json(within_bounds([found], [{"pause": 0.1}], [0.1], 0.1, {}))
    assert (shares["gap_within_bound"], shares["late_first_token_within_bound"]) == (1.0, 0.0)
