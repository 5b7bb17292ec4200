"""The queue of a SQLite ledger's writers, in all processes.

SQLite has none: a writer that waits tries again after pauses of up to 0.1 s, and another one that writes without pauses
may keep it out until its time is over. Here a writer first waits until it is at the head of the queue, and is then the
only one that tries. The queue decides nothing but the order; SQLite's own lock protects the data.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_S = 0.5  # a process at the head may be suspended: then the others go on without the queue
_PAUSE_S = 0.001


class WriterQueue:
    """A place in the queue, for one writer of this process at a time; its file stands beside the ledger's."""

    def __init__(self, ledger_file: Path) -> None:
        self._file = ledger_file.with_name(f"{ledger_file.name}-queue")
        self._descriptor: int | None = None
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def at_head(self) -> Iterator[None]:
        """Wait until this writer is at the head, at most 0.5 s. The block tries to get SQLite's lock."""
        until = time.monotonic() + _PATIENCE_S
        is_only = self._one_at_a_time.acquire(timeout=_PATIENCE_S)
        is_head = is_only and self._reach_head(until)
        try:
            yield
        finally:
            if is_head and self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            if is_only:
                self._one_at_a_time.release()

    def _reach_head(self, until: float) -> bool:
        """Wait for the file's lock, which ends with the process that holds it. Returns False if there is none."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if time.monotonic() >= until:
                    return False
                time.sleep(_PAUSE_S)
        except OSError:  # a file system without such locks, or no permission: SQLite itself says what is wrong
            return False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
