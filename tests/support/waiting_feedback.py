"""Feedback about a message that is still streamed: a test sees that it waits, and only then lets the stream end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.servers import RunningExplorer, wait_until


@contextmanager
def feedback_that_waits(explorer: RunningExplorer, **body: Any) -> Iterator[list[dict[str, Any]]]:
    """Send feedback, and run the block while it waits for streams. Yields a list with its answer after the block."""
    streams, waits, answers = explorer.deps.open_streams, threading.Event(), []
    wait_recorded = streams.wait_recorded

    async def noted(msg_ids: list[str]) -> None:
        waits.set()
        await wait_recorded(msg_ids)

    def send() -> None:
        answers.append(explorer.http.post("/feedback", json=body).json())

    streams.wait_recorded = noted  # type: ignore[method-assign]
    sender = threading.Thread(target=send)
    sender.start()
    wait_until(lambda: waits.is_set() or not sender.is_alive())
    assert sender.is_alive(), f"it was answered at once: {answers}"
    yield answers
    sender.join()
