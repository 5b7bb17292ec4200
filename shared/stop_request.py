"""A request to stop, made by a signal."""

from __future__ import annotations

import os
import select
import signal


class StopRequest:
    """Set by SIGTERM or SIGINT. Wait on it instead of sleeping.

    It uses a pipe, not a threading.Event: the handler may run while the main thread holds the event's lock, and would
    wait for itself.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)

    def listen(self) -> StopRequest:
        """Install the signal handlers (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        return self

    def set(self) -> None:
        if not self._stopped:
            self._stopped = True
            os.write(self._writable, b"!")  # never read, so that later waits wake up, too

    def __bool__(self) -> bool:
        return self._stopped

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Returns True if the process should stop."""
        waiting = select.poll()
        waiting.register(self._readable, select.POLLIN)
        waiting.poll(max(0.0, timeout_s) * 1000)
        return self._stopped

    def __del__(self) -> None:
        for descriptor in (self._readable, self._writable):
            os.close(descriptor)
