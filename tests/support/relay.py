"""A relay in front of an engine: it forwards everything, and calls a function when the explorer requests a path."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

PIECE_BYTES = 65_536


class Relay:
    """Runs in its own thread on a free loopback port."""

    def __init__(self, port: int) -> None:
        """port: the engine's."""
        self.on_call: dict[str, Callable[[], bool]] = {}  # by path, called once each; returns whether to forward
        self.url = ""
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(ours):
                ways = {
                    asyncio.create_task(self._pass_requests(reader, ours)),
                    asyncio.create_task(_pass(theirs, writer)),
                }
                _, pending = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in pending:
                    way.cancel()

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                happen = self.on_call.pop(_path(piece), None)
                if happen is not None and not await asyncio.to_thread(happen):
                    return
                writer.write(piece)
                await writer.drain()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


def _path(piece: bytes) -> str:
    """The path of the request that begins here: on a kept connection, a client sends one request at a time."""
    method, _, rest = piece.partition(b" ")
    return rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1") if method == b"POST" else ""
