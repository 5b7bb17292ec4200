"""What goes wrong while an engine's answer is handed on is heard of by whoever waits for it."""

from __future__ import annotations

import asyncio

import pytest

from explorer_service.engines.connection import Connections

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("rest", [b"no", b"whole"], ids=["more to come", "with its last part"])
def test_what_the_taker_raises_is_raised_where_it_is_waited_for(rest):
    def take(_data: bytes) -> bool:
        raise ValueError("no chat completion")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        await asked.wait()
        writer.write(rest)
        await reader.read()
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        connections = Connections(10.0)
        reply = await connections.request("POST", f"http://{host}:{port}", "/", b"", {})
        flowing = asyncio.ensure_future(reply.flow(take))
        await asyncio.sleep(0)
        asked.set()
        with pytest.raises(ValueError, match="no chat completion"):
            await flowing
        reply.close()
        connections.close()
        server.close()

    async def run() -> None:
        await asyncio.wait_for(ask(), 10)

    asked = asyncio.Event()
    asyncio.run(run())
