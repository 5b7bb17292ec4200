"""A side task or thread that dies stops the process, with its traceback in the log."""

from __future__ import annotations

import asyncio
import threading

import pytest

from explorer_service.background import Background
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.metrics import ExplorerMetrics
from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from tests.support.servers import wait_until


async def test_a_task_that_dies_stops_the_process(caplog):
    stopped = asyncio.Event()
    background = Background(stopped.set)

    async def die() -> None:
        raise RuntimeError("no more")

    background.start_task("poller", die())
    await asyncio.wait_for(stopped.wait(), 60)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "task=poller" in record.getMessage()


async def test_a_task_that_ends_by_itself_stops_the_process(caplog):
    stopped = asyncio.Event()
    background = Background(stopped.set)
    background.start_task("poller", asyncio.sleep(0))
    await asyncio.wait_for(stopped.wait(), 60)
    assert "task=poller" in caplog.text


async def test_tasks_that_are_told_to_end_do_so_quietly(caplog):
    ended = asyncio.Event()
    background = Background(ended.set)
    background.start_task("poller", asyncio.sleep(3600))
    await asyncio.sleep(0)
    await background.stop_tasks()
    assert not ended.is_set()
    assert not caplog.records


@pytest.mark.parametrize("error", [RuntimeError("no more"), SystemExit()])
def test_a_thread_that_dies_stops_the_process(caplog, error):
    stopped = threading.Event()

    def die() -> None:
        raise error

    Background(stopped.set).start_thread("writer", die).join(60)
    assert stopped.is_set()
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "thread=writer" in record.getMessage()


async def test_who_waits_for_a_writer_that_dies_hears_of_it(tmp_path, monkeypatch):
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    stopped = threading.Event()
    writer = LedgerWriter(ledger, ExplorerMetrics(), Background(stopped.set))

    def die(_group: object) -> None:
        raise SystemExit

    monkeypatch.setattr(writer, "_commit_group", die)
    first = asyncio.ensure_future(writer.write(lambda connection: 1))
    await asyncio.to_thread(wait_until, stopped.is_set, 60)
    with pytest.raises(LedgerError, match="writer has ended"):
        await asyncio.wait_for(writer.write(lambda connection: 2), 60)
    await asyncio.wait_for(writer.stop(), 60)
    first.cancel()
    ledger.close()
