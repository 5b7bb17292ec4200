"""Time limits of the agent's side that begin, or end, only when the test is at the point for which it sets them.

A busy machine may take longer for what comes before than any limit that a test can afford to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from flywheel.learning import Learning
from flywheel.workflow import within

_LOOK_S = 0.01


def end_when(monkeypatch: pytest.MonkeyPatch, ready: Callable[[], bool]) -> None:
    """The `seconds` of learn are not over before `ready` is true."""
    end = Learning.end

    def end_or_wait(one: Learning, reason: str) -> None:
        if reason != "time" or ready():
            end(one, reason)
        else:
            asyncio.get_running_loop().call_later(_LOOK_S, end_or_wait, one, reason)

    monkeypatch.setattr(Learning, "end", end_or_wait)


def limit_when(monkeypatch: pytest.MonkeyPatch, module: str, reached: Callable[[], object]) -> None:
    """The `timeout_s` of a call that flywheel.MODULE makes begins only when `reached` is true."""

    async def limited(call: Awaitable[Any], timeout_s: float | None) -> Any:
        job = asyncio.ensure_future(call)
        try:
            while not (job.done() or reached()):
                await asyncio.wait({job}, timeout=_LOOK_S)
            return await within(job, timeout_s)
        finally:
            job.cancel()

    monkeypatch.setattr(f"flywheel.{module}.within", limited)
