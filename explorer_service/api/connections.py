"""The callers' connections of a process: how many there may be, and who makes room for one more."""

from __future__ import annotations

import resource
from asyncio import Transport

from shared.config import ExplorerConfig

_RESERVED_DESCRIPTORS = 256  # for all that is neither a caller's connection nor one to an engine


class Connections:
    """All connections of a process, and which of them have no complete request: one of those makes room."""

    def __init__(self, limits: ExplorerConfig, max_open: int) -> None:
        self.limits = limits
        self._max_open = max_open
        self._open: set[Transport] = set()
        self._incomplete: dict[Transport, None] = {}  # the one that has been so for the longest time is first

    def admit(self, connection: Transport) -> bool:
        """Take in a new connection. Where it is one too many, another one is closed; False when all are busy."""
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
        """Its request is complete."""
        self._incomplete.pop(connection, None)

    def end_answer(self, connection: Transport) -> None:
        if connection in self._open:
            self._incomplete[connection] = None

    def remove(self, connection: Transport) -> None:
        self._open.discard(connection)
        self._incomplete.pop(connection, None)


def raise_descriptor_limit(connections: int) -> int:
    """Raise this process' limit of open files for so many connections; returns for how many it is enough.

    A caller's connection may need one to an engine beside it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + _RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    soft = needed if hard == resource.RLIM_INFINITY else max(soft, min(hard, needed))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, (soft - _RESERVED_DESCRIPTORS) // 2))
