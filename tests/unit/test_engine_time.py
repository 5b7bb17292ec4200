"""The time limit of an engine's answer that has no length: the end of its connection is the end of the answer."""

from __future__ import annotations

import asyncio

import pytest

from explorer_service.engines.http import EngineHttp

BEGINNING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"


async def begin_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(BEGINNING)
    await reader.read()  # until the client closes
    writer.close()


async def test_an_answer_that_took_too_long_is_not_whole_for_a_reader_that_comes_later():
    server = await asyncio.start_server(begin_and_wait, "127.0.0.1", 0)
    async with server:
        client = EngineHttp(240.0, 1 << 20)
        response = await client.post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", b"", {})
        assert await response.read_some() == b"data: 1\n\n"
        asyncio.get_running_loop().call_soon(response._expire)  # what its timer does
        while response._connection.is_open:  # noqa: ASYNC110 — a connection has no event for its end
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # asyncio reports the end of the connection
        with pytest.raises(TimeoutError):
            await response.read_some()
        response.close()
