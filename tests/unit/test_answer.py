"""Streams whose caller leaves: what they held is free again, wherever they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest

from explorer_service.answer import StreamAnswer


@pytest.mark.parametrize("sent", [0, 1, 2], ids=["while the head goes out", "at the first event", "at the second"])
def test_a_stream_frees_what_it_held_when_its_caller_leaves(sent):
    freed, left = [], asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        for number in range(9):
            yield b"data: %d\n\n" % number

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        nonlocal sent
        sent -= 1
        if sent < 0:
            left.set()
            await asyncio.Event().wait()  # the network takes no more

    async def stream() -> None:
        held = AsyncExitStack()
        held.callback(freed.append, True)
        await StreamAnswer(events(), held, 200, {})({}, receive, send)

    asyncio.run(stream())
    assert freed == [True]
