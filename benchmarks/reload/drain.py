"""The peer's method for new weights, `_sync_model_weights` of Trinity-RFT 0.6's explorer, on our engine.

It takes the engine out of use, polls it each second until it is idle, and then loads.
"""

from __future__ import annotations

import asyncio

from benchmarks.reload.service import Service
from benchmarks.reload.turn import Callers
from shared.versions import version_path

POLL_S = 1.0  # between two polls of the engine's load


async def drain_and_load(service: Service, callers: Callers) -> None:
    """Load the version in service again: the cost is the same, and the explorer does not notice."""
    folder = service.config.root / version_path(await asyncio.to_thread(service.read_version))
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    callers.open.clear()
    try:
        while callers.in_flight:  # noqa: ASYNC110 — the peer polls each second too
            await asyncio.sleep(POLL_S)
        for path, body in (
            ("/pause?mode=keep", None),
            ("/collective_rpc", load),
            ("/reset_prefix_cache", None),
            ("/resume", None),
        ):
            await asyncio.to_thread(service.ask_engine, "POST", path, body)
    finally:
        callers.open.set()
