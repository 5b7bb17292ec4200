"""Supervise the side tasks and threads of the process: if one dies, the process stops.

A process without its writer, its poller or an engine's controller would run on with fewer and fewer functions. So each
of them must run until it is stopped. If one ends by itself, this is logged with its traceback, and the process gets a
stop request; its runner then reads `failed`, and exits with a status that a supervisor treats as failure.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine

from shared.log import StageLogger

log = StageLogger("explorer")


def stop_process() -> None:
    """Request an orderly stop of this process."""
    os.kill(os.getpid(), signal.SIGTERM)


class Background:
    """Side tasks and threads. stop: called when one of them dies."""

    def __init__(self, stop: Callable[[], None] = stop_process) -> None:
        self._stop = stop
        self.failed: str | None = None  # the first task or thread that died
        self._tasks: list[asyncio.Task[None]] = []

    def start_task(self, name: str, run: Coroutine[None, None, None]) -> None:
        """Run a coroutine that ends only by cancellation."""
        task = asyncio.create_task(self._watch(name, run), name=name)
        self._tasks.append(task)

    async def _watch(self, name: str, run: Coroutine[None, None, None]) -> None:
        try:
            await run
            log.error("a side task ended; the process stops", task=name)
        except Exception:  # the boundary of a task
            log.exception("a side task died; the process stops", task=name)
        self._fail(name)

    def start_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Run a function that ends only when it is stopped. Returns its thread, to be joined."""

        def guarded() -> None:
            try:
                run()
            except BaseException:  # the boundary of a thread
                log.exception("a thread died; the process stops", thread=name)
                self._fail(name)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _fail(self, name: str) -> None:
        self.failed = self.failed or name
        self._stop()

    async def stop_tasks(self) -> None:
        """Cancel the tasks and wait for their end. Threads are stopped by their owners."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
