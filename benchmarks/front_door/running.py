"""Coroutines of a program that SIGTERM ends in order, with the processes that it started."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def end_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in this program: at once, or from `run`."""
    signal.signal(signal.SIGTERM, _end)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop. Raises SystemExit if SIGTERM comes meanwhile."""
    try:
        return uvloop.run(coroutine)
    except asyncio.CancelledError:
        sys.exit("stopped")


def _end(*_: object) -> None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        sys.exit("stopped")
    for task in asyncio.all_tasks(loop):  # in a protocol's callback, uvloop would log SystemExit and go on
        loop.call_soon_threadsafe(task.cancel)
