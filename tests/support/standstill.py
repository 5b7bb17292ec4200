"""A clock that stops while the machine keeps this process from its processor or its disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TICK_S = 0.1
_LATE_S = 0.2  # a tick that is later than this: something stood still


class OwnClock:
    """For how long the product takes, apart from what it has to wait for like everything on a busy machine.

    Two threads tick; one of them writes a file to the disk at each tick. A late tick is time that does not count.
    """

    def __init__(self) -> None:
        self._lost_s = [0.0, 0.0]
        self._due = [0.0, 0.0]  # time.monotonic(): the next ticks
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, folder: Path) -> None:
        """folder: on the disk whose standstills do not count."""
        file = folder / "ticks"
        self._due = [time.monotonic() + _TICK_S] * 2
        self._threads = [
            threading.Thread(target=self._tick, args=args) for args in ((0, lambda: None), (1, lambda: _write(file)))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def now(self) -> float:
        """Seconds that count."""
        with self._lock:
            now = time.monotonic()
            late = [now - due for due in self._due]
            return now - max(lost + (s if s > _LATE_S else 0.0) for lost, s in zip(self._lost_s, late, strict=True))

    def _tick(self, number: int, work: Callable[[], None]) -> None:
        while not self._end.wait(max(0.0, self._due[number] - time.monotonic())):
            work()
            with self._lock:
                now = time.monotonic()
                late_s = now - self._due[number]
                self._lost_s[number] += late_s if late_s > _LATE_S else 0.0
                self._due[number] = now + _TICK_S


def _write(file: Path) -> None:
    with file.open("wb") as opened:
        opened.write(b"tick")
        opened.flush()
        os.fsync(opened.fileno())
