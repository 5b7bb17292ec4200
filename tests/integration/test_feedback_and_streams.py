"""Which streams feedback waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.ledger import transitions
from tests.support.servers import RunningExplorer, wait_until
from tests.support.waiting_feedback import feedback_that_waits


def leave_while_the_row_is_stored(explorer: RunningExplorer, begun: threading.Event) -> str:
    """Read a stream up to its last token but one, and leave it while the row is stored. Returns the id.

    begun: set once the row is about to be stored.
    """
    writer, recording = explorer.deps.writer, []
    record = writer.record

    async def record_noted(samples):
        recording.append(asyncio.current_task())
        await record(samples)

    writer.record = record_noted
    with explorer.http.stream("POST", "/run/t/1/chat", json={"messages": [], "stream": True}) as reply:
        lines = reply.iter_lines()  # httpx closes the connection with the iterator
        line = next(line for line in lines if '"content": "t12"' in line)
        wait_until(begun.is_set)
    wait_until(lambda: recording[0].cancelling() > 0)  # the explorer has noticed
    return line.partition('"id": "')[2].partition('"')[0]


@pytest.mark.parametrize("by_name", [True, False])
def test_feedback_waits_for_the_row_of_a_stream_that_its_caller_left_while_it_is_stored(
    scripted_engine, start_explorer, by_name, monkeypatch
):
    explorer = start_explorer([scripted_engine.url], ledger_timeout_s=60.0).wait_ready()
    begun, stored, record = threading.Event(), threading.Event(), transitions.record

    def record_slowly(*given):
        begun.set()
        stored.wait(50)
        return record(*given)

    monkeypatch.setattr(transitions, "record", record_slowly)
    msg_id = leave_while_the_row_is_stored(explorer, begun)
    targets = {"msg_ids": [msg_id]} if by_name else {"task_id": "t", "run_id": "1"}
    with feedback_that_waits(explorer, **targets, reward=1) as answers:
        stored.set()
    assert answers[0]["receipts"] == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_for_a_run_waits_for_no_stream_that_is_not_recorded(explorer, scripted_engine):
    path = "/run/t/1/chat"
    explorer.http.post(path, json={"messages": []}).raise_for_status()
    scripted_engine.script.streams_wait = True
    with explorer.http.stream("POST", path, json={"messages": [], "stream": True, "store": False}) as reply:
        lines = reply.iter_lines()
        next(lines)
        answer = explorer.http.post("/feedback", json={"task_id": "t", "run_id": "1", "reward": 1}).json()
        assert answer["applied"] == 1
        assert scripted_engine.script.events < 4, "the stream goes on"
