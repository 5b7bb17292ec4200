"""Streams whose caller leaves, or reads slowly: what they held is free again, and what they said comes in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest

from explorer_service.answer import CallerStays, Lane, StreamAnswer


@pytest.mark.parametrize("sent", [0, 1, 2], ids=["while the head goes out", "at the first event", "at the second"])
def test_a_stream_frees_what_it_held_when_its_caller_leaves(sent):
    freed, left = [], asyncio.Event()

    async def events(_lane: object) -> AsyncGenerator[bytes]:
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
        await StreamAnswer(events, held, 200, {})({}, receive, send)

    asyncio.run(stream())
    assert freed == [True]


def test_what_the_server_lets_wait_goes_before_the_rest():
    taken: list[bytes] = []

    async def offer_all() -> None:
        room = asyncio.Event()

        async def send(message: dict[str, bytes]) -> None:
            if message["body"] == b"1":
                await room.wait()  # as uvicorn does while its caller reads too slowly
                await asyncio.sleep(0)
            taken.append(message["body"])

        lane = Lane(send)
        lane.offer(b"0")
        assert lane.is_free
        lane.offer(b"1")
        assert not lane.is_free
        clearing = asyncio.ensure_future(lane.clear())
        await asyncio.sleep(0)
        assert taken == [b"0"]
        room.set()
        await clearing
        assert lane.is_free
        lane.offer(b"2")

    asyncio.run(offer_all())
    assert taken == [b"0", b"1", b"2"]


def test_a_caller_who_leaves_while_a_part_waits_ends_it():
    ended = []

    async def leave() -> None:
        async def send(_message: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        lane = Lane(send)
        lane.offer(b"0")
        clearing = asyncio.ensure_future(lane.clear())
        await asyncio.sleep(0)
        clearing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await clearing
        lane.close()

    asyncio.run(leave())
    assert ended == [True]


def test_a_server_that_wakes_as_the_block_ends_is_no_error():
    """As uvicorn does at the end of every answer: what waited for a disconnect is woken when nobody is watched."""
    errors: list[object] = []

    async def answer() -> None:
        whole = asyncio.Event()

        async def receive() -> dict[str, str]:
            await whole.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        with CallerStays(receive):
            await asyncio.sleep(0)
            whole.set()
        await asyncio.sleep(0)

    asyncio.run(answer())
    assert errors == []
