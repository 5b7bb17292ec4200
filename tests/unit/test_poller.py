"""One thread asks the ledger which versions should serve, for all engines of an explorer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from explorer_service.background import Background
from explorer_service.reload.poller import VersionPoller
from shared.ledger.connect import Ledger
from shared.ledger.queries import Wanted


class Waiting:
    """Queries that wait for `go_on`; the shares that they find name their number."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.asked = 0

    def __call__(self) -> Wanted:
        self.asked += 1
        found = Wanted(None, {self.asked: 1.0})
        self.begun.set()
        assert self.go_on.wait(60)
        return found


@pytest.fixture
async def poller(tmp_path: Path) -> AsyncIterator[VersionPoller]:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    poller = VersionPoller(ledger, 60.0)
    yield poller
    await poller.stop()
    ledger.close()


async def test_who_asks_during_a_query_gets_what_is_read_after_it(poller, monkeypatch):
    monkeypatch.setattr(poller, "_query", waiting := Waiting())
    first = asyncio.ensure_future(poller.refresh())
    await asyncio.to_thread(waiting.begun.wait, 60)
    second = asyncio.ensure_future(poller.refresh())
    await asyncio.sleep(0)
    waiting.go_on.set()
    await asyncio.wait_for(asyncio.gather(first, second), 60)
    assert poller.shares == {2: 1.0}


async def test_a_poller_that_dies_stops_the_process(poller, monkeypatch, caplog):
    def die() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(poller, "_query", die)
    stopped = asyncio.Event()
    Background(stopped.set).start_task("version-poller", poller.run())
    await asyncio.wait_for(stopped.wait(), 60)
    assert "task=version-poller" in caplog.text


async def test_the_end_waits_for_a_query_without_stopping_the_event_loop(tmp_path, monkeypatch):
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    poller = VersionPoller(ledger, 60.0)
    monkeypatch.setattr(poller, "_query", waiting := Waiting())
    asked = asyncio.ensure_future(poller.refresh())
    await asyncio.to_thread(waiting.begun.wait, 60)
    asked.cancel()
    ending = asyncio.ensure_future(poller.stop())
    await asyncio.sleep(0)
    assert not ending.done()
    waiting.go_on.set()
    await asyncio.wait_for(ending, 60)
    ledger.close()
