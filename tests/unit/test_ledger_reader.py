"""Reads of the ledger for callers: who waits for a thread, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from explorer_service.ledger_reader import LedgerReader
from shared.errors import LedgerError


class Database:
    """A ledger whose queries wait for a gate, and then do what they are."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def fetch(self, query: Callable[[], Any]) -> Any:
        return query()

    def waiting(self, then: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: self.gate.wait(60) and then()


def refused() -> None:
    raise ValueError("the caller's mistake")


def unavailable() -> None:
    raise LedgerError("the database does not answer")


async def let_all_wait() -> None:
    """Let tasks that have begun run until each waits for a thread or a query."""
    for _ in range(5):
        await asyncio.sleep(0)


def read_all(first: Callable[[], Any], others: int, timeout_s: float, *, opens_last: bool = False) -> list[Any]:
    """What four reads that have the threads, and others that wait for them, end with.

    opens_last: the queries of the four go on only after the others have ended.
    """
    database = Database()

    async def read() -> list[Any]:
        reader = LedgerReader(database, timeout_s)  # type: ignore[arg-type]
        having = [asyncio.ensure_future(reader.read(database.waiting(first), 60.0)) for _ in range(4)]
        await let_all_wait()
        waiting = [asyncio.ensure_future(reader.read(lambda: "answer", 60.0)) for _ in range(others)]
        await let_all_wait()
        if opens_last:
            await asyncio.wait(waiting)
        database.gate.set()
        ended = await asyncio.gather(*having, *waiting, return_exceptions=True)
        assert await reader.read(lambda: "later") == "later", "no thread is lost"
        await reader.stop()
        return ended

    return asyncio.run(read())


def test_a_callers_mistake_refuses_no_other_caller():
    ended = read_all(refused, 3, timeout_s=60.0)
    assert ended[4:] == ["answer"] * 3


def test_who_waits_behind_reads_that_get_no_answer_gets_none_either():
    ended = read_all(unavailable, 8, timeout_s=60.0)
    assert [type(one) for one in ended] == [LedgerError] * 12


def test_nobody_waits_longer_than_the_readers_time_without_an_answer():
    ended = read_all(lambda: "late", 8, timeout_s=0.2, opens_last=True)
    assert ended[:4] == ["late"] * 4
    assert [type(one) for one in ended[4:]] == [LedgerError] * 8


class Clock:
    """The time of a reader and of its event loop."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_read_waits_as_long_as_others_are_answered_and_its_own_time_lasts(monkeypatch):
    async def read(own_s: float | None) -> list[Any]:
        clock = Clock()
        monkeypatch.setattr("explorer_service.ledger_reader.time", clock)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
        reader, databases = LedgerReader(Database(), 9.5), [Database() for _ in range(16)]  # type: ignore[arg-type]
        reads = [asyncio.ensure_future(reader.read(one.waiting(lambda: "answer"), own_s)) for one in databases]
        for reading, database in zip(reads, databases, strict=True):
            await let_all_wait()
            clock.now_s += 1.0
            await let_all_wait()  # whoever has no time left ends
            database.gate.set()
            await asyncio.wait([reading])
        ended = await asyncio.gather(*reads, return_exceptions=True)
        await reader.stop()
        return ended

    assert asyncio.run(read(60.0)) == ["answer"] * 16
    ended = asyncio.run(read(None))
    assert ended[:9] == ["answer"] * 9
    assert [type(one) for one in ended[9:]] == [LedgerError] * 7


def test_a_caller_that_leaves_while_it_waits_takes_no_thread_along():
    async def leave() -> None:
        database = Database()
        reader = LedgerReader(database, 60.0)  # type: ignore[arg-type]
        having = [asyncio.ensure_future(reader.read(database.waiting(lambda: "answer"))) for _ in range(4)]
        await let_all_wait()
        left = asyncio.ensure_future(reader.read(lambda: "answer"))
        await let_all_wait()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        database.gate.set()
        await asyncio.gather(*having)
        assert await asyncio.gather(*(reader.read(lambda: "again") for _ in range(8))) == ["again"] * 8
        await reader.stop()

    asyncio.run(leave())
