"""A fast client, so that the measurement is of the gateway. Supports only the HTTP/1.1 that the gateways use."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from benchmarks.front_door.gateways import Gateway

PATH = "/v1/chat/completions"
EVENT = b"data: "


class ChatFailed(Exception):
    """The gateway accepted no connection, closed it during an answer, or answered with a status other than 200."""


class Client(asyncio.Protocol):
    """One keep-alive connection, reopened if the gateway closed it. Records when each event arrives."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._done: asyncio.Future[None] | None = None
        self._need = -1  # bytes of the whole response; -1: not known yet; -2: ends with the last chunk
        self.arrivals: list[float] = []  # of the events of a stream
        self.status = 0

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, but is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ChatFailed("the connection was closed"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def send(self, request: bytes) -> float:
        """Send the request and wait for the whole response. Returns seconds. Raises ChatFailed."""
        if self._transport is None:
            try:
                await self.connect()
            except OSError as error:
                raise ChatFailed(f"no connection: {error}") from error
        assert self._transport is not None
        self._buffer.clear()
        self.arrivals.clear()
        self._need = -1
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        await self._done
        if self.status != 200:
            raise ChatFailed(f"status {self.status}: {bytes(self._buffer[:500])!r}")
        return time.perf_counter() - started

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        searched = max(0, len(self._buffer) - len(EVENT) + 1)  # the event's first bytes may have arrived earlier
        self._buffer += data
        if self._need == -1:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            self.status = int(head[9:12])
            at = head.find(b"content-length:")
            self._need = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -2
        if self._need == -2:
            self.arrivals += [now] * self._buffer.count(EVENT, searched)
        whole = self._buffer.endswith(b"\r\n0\r\n\r\n") if self._need == -2 else len(self._buffer) >= self._need
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(None)


def http_request(gateway: Gateway, **more: Any) -> bytes:
    """A chat. Sent directly to the engine, it requests token ids and logprobs, as the gateways do."""
    if gateway.process is None:
        more |= {"logprobs": True, "return_token_ids": True}
    messages = [{"role": "user", "content": "Where is my parcel? " * 20}]
    body = json.dumps({"model": "agent", "messages": messages, "temperature": 0.8, **more}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def connected(gateway: Gateway, count: int) -> AsyncIterator[list[Client]]:
    """Several clients. Their connections close at the end: open ones would count as the gateway's memory."""
    clients = [Client(gateway.port) for _ in range(count)]
    for client in clients:
        await client.connect()
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


async def wait_ready(gateway: Gateway, limit_s: float = 300.0) -> None:
    """Wait until a chat is answered. If the gateway's process ends first, exit with its log."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            async with connected(gateway, 1) as (client,):
                await asyncio.wait_for(client.send(http_request(gateway)), 10)
            return
        except (OSError, ChatFailed) as error:
            if (log := gateway.why_not_running()) is not None:
                raise SystemExit(f"{gateway.name} ended at its start:\n{log}") from error
            if time.monotonic() > deadline:
                raise SystemExit(f"{gateway.name}: no answer within {limit_s:g} s: {error!r}") from error
            await asyncio.sleep(0.3)
