"""The callers' connections of a process, up to a limit. At the limit, one without a complete request is closed."""

from __future__ import annotations

import resource
from asyncio import Transport

from shared.config import ExplorerConfig

_RESERVED_DESCRIPTORS = 256  # for files other than connections to callers and engines


class Connections:
    """All connections of a process. Those without a complete request may be closed for a new one."""

    def __init__(self, limits: ExplorerConfig, max_open: int) -> None:
        self.limits = limits
        self._max_open = max_open
        self._open: set[Transport] = set()
        self._incomplete: dict[Transport, None] = {}  # without a complete request, the longest first

    def admit(self, connection: Transport) -> bool:
        """Add a new connection, and close another one if the limit is reached. Returns False if all are busy."""
        if len(self._open) >= self._max_open:
            oldest = next(iter(self._incomplete), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.abort()
        self._open.add(connection)
        self._incomplete[connection] = None
        return True

    def begin_answer(self, connection: Transport) -> None:
        """The connection's request is complete."""
        self._incomplete.pop(connection, None)

    def end_answer(self, connection: Transport) -> None:
        if connection in self._open:
            self._incomplete[connection] = None

    def remove(self, connection: Transport) -> None:
        self._open.discard(connection)
        self._incomplete.pop(connection, None)


def raise_descriptor_limit(connections: int) -> int:
    """Raise this process' limit of open files for this many callers' connections. Returns how many it allows.

    Each may also need a connection to an engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + _RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    soft = needed if hard == resource.RLIM_INFINITY else max(soft, min(hard, needed))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, (soft - _RESERVED_DESCRIPTORS) // 2))
