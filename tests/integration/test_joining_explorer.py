"""The first seconds of an explorer that joins another one, which was alone and announced no streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.servers import RunningExplorer


@contextmanager
def streaming(explorer: RunningExplorer) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield a stream's id and the rest of its lines."""
    with explorer.http.stream("POST", "/run/t/1/chat", json={"stream": True, "messages": []}) as reply:
        lines = reply.iter_lines()
        yield json.loads(next(lines).removeprefix("data: "))["id"], lines


def receipts_of_feedback(explorer: RunningExplorer, targets: dict[str, Any], lines: Iterator[str]) -> list[Any]:
    """Send feedback about a stream, then read the stream to its end. Returns the answer's receipts."""
    answers = []
    sender = threading.Thread(
        target=lambda: answers.append(explorer.http.post("/feedback", json={**targets, "reward": 1}).json())
    )
    sender.start()
    for _ in lines:
        pass
    sender.join()
    receipts: list[Any] = answers[0].get("receipts", answers)
    return receipts


def test_feedback_to_an_explorer_that_has_just_joined_waits_for_a_stream_of_another(scripted_engine, start_explorer):
    first = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.gap_s = 0.7
    with streaming(first) as (msg_id, lines):
        second = start_explorer([scripted_engine.url])
        found = receipts_of_feedback(second, {"msg_ids": [msg_id]}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_about_a_run_that_streams_elsewhere_waits_at_an_explorer_that_has_just_joined(
    scripted_engine, start_explorer
):
    first = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.gap_s = 0.7
    with streaming(first) as (msg_id, lines):
        second = start_explorer([scripted_engine.url])
        found = receipts_of_feedback(second, {"task_id": "t", "run_id": "1"}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]


def test_feedback_waits_for_a_stream_of_an_explorer_that_has_just_joined(scripted_engine, start_explorer):
    first = start_explorer([scripted_engine.url]).wait_ready()
    second = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.gap_s = 0.3
    with streaming(second) as (msg_id, lines):
        found = receipts_of_feedback(first, {"msg_ids": [msg_id]}, lines)
    assert found == [{"msg_id": msg_id, "state": "applied"}]
