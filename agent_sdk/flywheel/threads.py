"""Threads for a user's sync functions. A function that hangs delays neither the pool's exit nor the process's.

The threads of concurrent.futures are joined when the process ends. These are daemon threads, which end with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from flywheel.errors import ConfigError

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """A pool of up to `at_once` daemon threads, started on demand. A function that hangs occupies one of them.

    >>> with DaemonThreads(2, "example") as threads:
    ...     threads.submit(sum, [1, 2]).result()
    3
    """

    def __init__(self, at_once: int, name: str) -> None:
        if at_once < 1:
            raise ConfigError(f"at_once={at_once}: give 1 or more")
        self._at_once = at_once
        self._name = name
        self._jobs: deque[_Job] = deque()  # waiting for a thread
        self._started = 0  # number of threads
        self._idle = 0  # number of threads that wait for a job
        self._is_shut = False
        self._changed = threading.Condition()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of a call. Raises RuntimeError after shutdown."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_shut:
                raise RuntimeError(f"the threads {self._name} were shut down")
            if self._idle <= len(self._jobs) and self._started < self._at_once:
                threading.Thread(target=self._work, name=f"{self._name}_{self._started}", daemon=True).start()
                self._started += 1
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel the calls that have not begun, and end the threads. Never waits for a call, even with `wait`."""
        with self._changed:
            self._is_shut = True
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for future, _ in jobs:
            future.cancel()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as exc:  # noqa: BLE001 — delivered by the future
                    future.set_exception(exc)
                else:
                    future.set_result(result)
                    del result
            del job, future, function  # an idle thread keeps no reference to a call

    def _next(self) -> _Job | None:
        """Return the next call, when there is one; None after shutdown."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_shut)
            self._idle -= 1
            return self._jobs.popleft() if self._jobs else None
