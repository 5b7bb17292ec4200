"""The crowds of benchmarks/crowds do what their figures say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from benchmarks.crowds import __main__ as program
from benchmarks.crowds import crowds
from benchmarks.crowds.__main__ import measure
from benchmarks.front_door.gateways import Gateway

NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class FakeExplorer:
    """Answers everything with 200, and feedback after a while. It can stand still."""

    def __init__(self, answer: str = "applied", feedback_s: float = 0.0) -> None:
        self._answer, self._feedback_s = answer, feedback_s
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.rewards: list[float] = []

    @contextlib.asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield Gateway("flywheel", server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"Content-Length: (\d+)", head)
                assert found
                body = await reader.readexactly(int(found[1]))
                await self._goes_on.wait()
                writer.write(await self._feedback(body) if b" /feedback " in head else NOTHING)
                if b"Connection: close" in head:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def standstill(self, _gateway: Gateway, _folder: Path) -> AsyncIterator[dict[str, float]]:
        """A crowd beside which the explorer stands still once, for half a second."""

        async def stand_still() -> None:
            await asyncio.sleep(0.5)
            self._goes_on.clear()
            await asyncio.sleep(0.5)
            self._goes_on.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(stand_still())
            yield {}

    async def _feedback(self, body: bytes) -> bytes:
        await asyncio.sleep(self._feedback_s)
        self.rewards.append(json.loads(body)["reward"])
        said = json.dumps({"receipts": [{"state": self._answer}]}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a gateway that recorded three chats."""
    monkeypatch.setattr(crowds, "TARGETS", 3)
    data = tmp_path / "flywheel" / "data"
    data.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(data / "ledger.sqlite3")) as ledger:
        ledger.execute("CREATE TABLE experiences (id INTEGER PRIMARY KEY, msg_id TEXT)")
        ledger.executemany("INSERT INTO experiences (msg_id) VALUES (?)", [("a",), ("b",), ("c",)])
        ledger.commit()
    return tmp_path


def test_slow_bodies_come_at_the_stated_pace_and_their_bytes_are_counted(tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=crowds.SLOW) as kept:  # the kernel keeps what they send

        async def drip() -> tuple[float, dict[str, float]]:
            began = time.perf_counter()
            async with crowds.slow(Gateway("flywheel", kept.getsockname()[1]), tmp_path) as figures:
                await asyncio.sleep(1.0)
            return time.perf_counter() - began, figures

        seconds, figures = uvloop.run(drip())
        bodies = 0
        for _ in range(crowds.SLOW):
            with kept.accept()[0] as opened, opened.makefile("rb") as stream:
                bodies += len(stream.read().partition(b"\r\n\r\n")[2])
    pace = crowds.SLOW / crowds.DRIP_S
    assert 0 < bodies <= pace * seconds + crowds.SLOW
    assert 0 < figures["bytes_per_s"] <= pace + crowds.SLOW


def test_no_two_feedbacks_have_the_same_reward_also_in_another_turn(recorded):
    explorer = FakeExplorer(feedback_s=0.01)

    async def turns() -> None:
        async with explorer.gateway() as gateway:
            for _ in range(2):
                async with crowds.raters(gateway, recorded) as figures:
                    while figures["crowd"] < 2:  # noqa: ASYNC110 — measure() queries it, too
                        await asyncio.sleep(0.01)

    uvloop.run(turns())
    assert len(explorer.rewards) >= 4 and len(set(explorer.rewards)) == len(explorer.rewards)


def test_feedback_that_writes_nothing_ends_the_measurement(recorded):
    async def turn() -> None:
        async with FakeExplorer("duplicate").gateway() as gateway:
            await measure(gateway, recorded, crowds.raters, 0.1, 0.01)

    with pytest.raises(ExceptionGroup) as raised:
        uvloop.run(turn())
    assert raised.group_contains(crowds.Misbehaviour, match="duplicate")


def test_a_measurement_beside_feedback_lasts_until_two_requests_are_answered(recorded):
    explorer = FakeExplorer(feedback_s=0.4)

    async def turn() -> dict[str, float]:
        async with explorer.gateway() as gateway:
            return await measure(gateway, recorded, crowds.raters, 0.1, 0.01)

    figures = uvloop.run(turn())
    assert figures["crowd"] >= 2 and figures["feedback_s"] >= 0.4
    assert figures["seconds"] >= 0.8


@pytest.mark.parametrize("seconds", [2.0, 0.7], ids=["in the middle", "at the end"])
def test_a_standstill_delays_all_steady_chats_that_are_due_meanwhile(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "HONEST", 8)
    explorer = FakeExplorer()

    async def turn() -> dict[str, float]:
        async with explorer.gateway() as gateway:
            return await measure(gateway, tmp_path, explorer.standstill, seconds, 0.02)

    figures = uvloop.run(turn())
    assert figures["chats"] == pytest.approx(8 * seconds / 0.02, abs=8)
    assert figures["p99_ms"] > 300


def test_steady_chats_are_due_at_a_fixed_rate_whatever_an_answer_takes(tmp_path):
    async def turn() -> dict[str, float]:
        async with FakeExplorer().gateway() as gateway:
            return await measure(gateway, tmp_path, crowds.nobody, 0.999, 0.1)

    assert uvloop.run(turn())["chats"] == 320


@pytest.mark.parametrize(("longer", "holds"), [([90.0, 400.0, 95.0], True), ([90.0, 120.0, 110.0], False)])
def test_beside_feedback_the_slowest_chat_has_a_bound_too(longer, holds):
    alone = [{"p99_ms": 10.0, "slowest_ms": 20.0, "failed": 0}] * 3
    beside = [{"p99_ms": 15.0, "slowest_ms": 20.0 + more, "failed": 0} for more in longer]
    turns = {"alone": alone, "beside": beside}
    found = program.summary(turns, program.LONGER_AT_MOST_MS["feedback"])
    assert found["holds"] is holds and found["longer_at_most_ms"] == 100
    assert program.summary(turns)["holds"]
