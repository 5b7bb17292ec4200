"""Watching the caller while its answer is made."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from explorer_service.api.body import while_caller_waits
from explorer_service.errors import CallerLeft


def test_a_caller_who_leaves_ends_the_work():
    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def run() -> None:
        async with while_caller_waits(leave):
            await asyncio.sleep(60)

    with pytest.raises(CallerLeft):
        asyncio.run(run())


def test_a_watch_that_is_over_is_freed_without_the_collector():
    """Else each chat, its body and its reply stay in memory until the collector's next run."""

    async def wait() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def run() -> bool:
        watch = while_caller_waits(wait)
        async with watch:
            await asyncio.sleep(0)
        gone = weakref.ref(watch)
        del watch
        await asyncio.sleep(0)  # the cancelled task ends
        await asyncio.sleep(0)
        return gone() is None

    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
