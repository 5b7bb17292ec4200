"""Which streams feedback waits for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.support.servers import RunningExplorer, wait_until


def leave_while_the_row_is_stored(explorer: RunningExplorer, stored: threading.Event) -> str:
    """Read a stream up to its last token but one, and leave it once the row is about to be stored. Returns the id.

    The row is stored after `stored` is set.
    """
    writer = explorer.deps.writer
    asyncio.run_coroutine_threadsafe(writer.write(lambda _: stored.wait(20)), writer._loop)
    with explorer.http.stream("POST", "/run/t/1/chat", json={"messages": [], "stream": True}) as reply:
        lines = reply.iter_lines()
        line = next(line for line in lines if '"content": "t12"' in line)
        wait_until(lambda: any(job.samples for job in tuple(writer._waiting)))
    time.sleep(0.2)  # the explorer has noticed
    return line.partition('"id": "')[2].partition('"')[0]


@pytest.mark.parametrize("by_name", [True, False])
def test_feedback_waits_for_the_row_of_a_stream_that_its_caller_left_while_it_is_stored(
    scripted_engine, start_explorer, by_name
):
    explorer = start_explorer([scripted_engine.url], ledger_timeout_s=30.0).wait_ready()
    stored = threading.Event()
    msg_id = leave_while_the_row_is_stored(explorer, stored)
    threading.Timer(0.3, stored.set).start()
    targets = {"msg_ids": [msg_id]} if by_name else {"task_id": "t", "run_id": "1"}
    answer = explorer.http.post("/feedback", json={**targets, "reward": 1}).json()
    assert answer["receipts"] == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_for_a_run_waits_for_no_stream_that_is_not_recorded(explorer, scripted_engine):
    path = "/run/t/1/chat"
    explorer.http.post(path, json={"messages": []}).raise_for_status()
    scripted_engine.script.gap_s = 5.0
    with explorer.http.stream("POST", path, json={"messages": [], "stream": True, "store": False}) as reply:
        lines = reply.iter_lines()
        next(lines)
        answer = explorer.http.post("/feedback", json={"task_id": "t", "run_id": "1", "reward": 1}).json()
        assert answer["applied"] == 1
        assert scripted_engine.script.events < 4, "the stream goes on"
