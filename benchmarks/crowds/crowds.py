"""The crowds: each lasts while its context is open. Independent of the honest callers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from benchmarks.front_door.client import http_request
from benchmarks.front_door.gateways import Gateway

SILENT, SLOW, DEAF, TARGETS = 2_000, 200, 50, 10_000
DRIP_S = 0.1  # between two bytes of a slow body
AT_ONCE = 10  # slow bodies that get a byte at once: uvloop rounds shorter pauses than a millisecond to none
SETTLE_S = 6.0  # until the buffers of callers that do not read are full
RECEIVE_BUFFER = 4096


class Misbehaviour(Exception):
    """A crowd did not behave as intended."""


@asynccontextmanager
async def nobody(_gateway: Gateway, _folder: Path) -> AsyncIterator[dict[str, float]]:
    yield {}


@asynccontextmanager
async def silent(gateway: Gateway, _folder: Path) -> AsyncIterator[dict[str, float]]:
    """Half of the connections have sent the beginning of a request's head."""
    sockets = [await _connect(gateway) for _ in range(SILENT)]
    for opened in sockets[::2]:
        opened.send(b"POST /chat HTTP/1.1\r\nHost: ")
    yield {"crowd": len(sockets)}
    _close(sockets)


@asynccontextmanager
async def slow(gateway: Gateway, _folder: Path) -> AsyncIterator[dict[str, float]]:
    head = f"POST /chat HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\nContent-Type: application/json\r\n"
    sockets = [await _connect(gateway) for _ in range(SLOW)]
    for opened in sockets:
        opened.send(f"{head}Content-Length: 100000\r\n\r\n".encode())

    figures: dict[str, float] = {"crowd": len(sockets)}
    sent, began = 0, time.perf_counter()

    async def drip() -> None:
        nonlocal sent
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for first in range(0, SLOW, AT_ONCE):
                for opened in sockets[first : first + AT_ONCE]:
                    sent += opened.send(b" ")
                due += AT_ONCE * DRIP_S / SLOW
                await asyncio.sleep(max(0.0, due - loop.time()))

    async with asyncio.TaskGroup() as group:  # one that fails ends the measurement
        dripping = group.create_task(drip())
        yield figures
        dripping.cancel()
    figures["bytes_per_s"] = sent / (time.perf_counter() - began)
    _close(sockets)


@asynccontextmanager
async def deaf(gateway: Gateway, _folder: Path) -> AsyncIterator[dict[str, float]]:
    request = http_request(gateway, stream=True)
    sockets = [await _connect(gateway) for _ in range(DEAF)]
    for opened in sockets:
        opened.send(request)
    await asyncio.sleep(SETTLE_S)
    yield {"crowd": len(sockets)}
    _close(sockets)


@asynccontextmanager
async def raters(gateway: Gateway, folder: Path) -> AsyncIterator[dict[str, float]]:
    """One feedback after the other on the same rows, each with another reward: an equal one would write nothing."""
    names = _recorded(folder)
    figures: dict[str, float] = {"crowd": 0}
    taken: list[float] = []
    ended = False

    async def rate() -> None:
        while not ended:
            began = time.perf_counter()
            await _feedback(gateway, json.dumps({"msg_ids": names, "reward": random.random()}).encode())
            taken.append(time.perf_counter() - began)
            figures["crowd"] = len(taken)

    async with asyncio.TaskGroup() as group:  # one that fails ends the measurement
        group.create_task(rate())
        yield figures
        ended = True
        figures["feedback_s"] = statistics.mean(taken)  # without the last one, which ends beside nobody


def _recorded(folder: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(folder / "flywheel" / "data" / "ledger.sqlite3")) as ledger:
        names = [name for (name,) in ledger.execute("SELECT msg_id FROM experiences ORDER BY id LIMIT ?", [TARGETS])]
    if len(names) < TARGETS:
        raise Misbehaviour(f"only {len(names)} chats were recorded to rate")
    return names


async def _feedback(gateway: Gateway, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1 << 24)
    head = f"POST /feedback HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise Misbehaviour(f"feedback was answered {answer[:200]!r}")
    if b"duplicate" in answer:
        raise Misbehaviour("feedback wrote nothing: it was a duplicate of the feedback before it")


async def _connect(gateway: Gateway) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    opened.setblocking(False)
    await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", gateway.port))
    return opened


def _close(sockets: list[socket.socket]) -> None:
    for opened in sockets:
        opened.close()


Crowd = Callable[[Gateway, Path], AbstractAsyncContextManager[dict[str, float]]]
CROWDS: dict[str, Crowd] = {"silent": silent, "slow": slow, "deaf": deaf, "feedback": raters}
