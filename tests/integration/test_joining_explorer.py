"""The first seconds of an explorer that joins another one, which was alone and announced no streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import select

from explorer_service import membership
from shared.ledger import queries
from shared.ledger.tables import open_streams
from tests.support.heartbeats import frequent_heartbeats  # noqa: F401 — a fixture
from tests.support.servers import RunningExplorer, wait_until

pytestmark = pytest.mark.usefixtures("frequent_heartbeats")


@contextmanager
def streaming(explorer: RunningExplorer) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield a stream's id and the rest of its lines."""
    with explorer.http.stream("POST", "/run/t/1/chat", json={"stream": True, "messages": []}) as reply:
        lines = reply.iter_lines()
        yield json.loads(next(lines).removeprefix("data: "))["id"], lines


@pytest.fixture
def join(scripted_engine, start_explorer):
    """Start an explorer that joins the first one, whose next heartbeat is not late for it, however busy the machine."""

    def start(first: RunningExplorer) -> RunningExplorer:
        began = time.monotonic()
        second = start_explorer([scripted_engine.url])
        joined = second.deps.membership
        assert joined.noticed_at > began + membership.HEARTBEAT_S, "the first one has sent one by then"
        noticed = joined.noticed

        async def noticed_in_time() -> None:
            await noticed()
            await asyncio.to_thread(wait_until, lambda: has_noticed(first))

        joined.noticed = noticed_in_time
        return second

    return start


def has_noticed(explorer: RunningExplorer) -> bool:
    """Whether it knows that it is not alone, and has announced its streams."""
    with explorer.ledger.read() as connection:
        announced = set(connection.execute(select(open_streams.c.msg_id)).scalars())
    return not explorer.deps.membership.is_alone and announced >= explorer.deps.open_streams._open.keys()


@pytest.fixture
def receipts_of_feedback(monkeypatch, scripted_engine):
    """Send feedback about a stream, which ends once an explorer waits for it. Returns the answer's receipts."""
    seen: list[bool] = []
    any_stream_open = queries.any_stream_open

    def look(*given: Any) -> bool:
        seen.append(any_stream_open(*given))
        return seen[-1]

    def send(explorer: RunningExplorer, targets: dict[str, Any], lines: Iterator[str]) -> list[Any]:
        answers = []
        sender = threading.Thread(
            target=lambda: answers.append(explorer.http.post("/feedback", json={**targets, "reward": 1}).json())
        )
        sender.start()
        wait_until(lambda: True in seen or not sender.is_alive())
        scripted_engine.script.streams_wait = False
        for _ in lines:
            pass
        sender.join()
        receipts: list[Any] = answers[0].get("receipts", answers)
        return receipts

    monkeypatch.setattr(queries, "any_stream_open", look)
    return send


@pytest.fixture
def first(scripted_engine, start_explorer) -> RunningExplorer:
    """An explorer that is alone, and whose streams do not end."""
    scripted_engine.script.streams_wait = True
    return start_explorer([scripted_engine.url]).wait_ready()


def test_feedback_to_an_explorer_that_has_just_joined_waits_for_a_stream_of_another(first, join, receipts_of_feedback):
    with streaming(first) as (msg_id, lines):
        found = receipts_of_feedback(join(first), {"msg_ids": [msg_id]}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_about_a_run_that_streams_elsewhere_waits_at_an_explorer_that_has_just_joined(
    first, join, receipts_of_feedback
):
    with streaming(first) as (msg_id, lines):
        found = receipts_of_feedback(join(first), {"task_id": "t", "run_id": "1"}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_waits_for_a_stream_of_an_explorer_that_has_just_joined(first, join, receipts_of_feedback):
    second = join(first).wait_ready()
    with streaming(second) as (msg_id, lines):
        found = receipts_of_feedback(first, {"msg_ids": [msg_id]}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]
