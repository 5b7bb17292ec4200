"""Choose among engines: the least loaded one, or the conversation's own, whose cache has its prefix."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from explorer_service.engines.engine import Engine

SLACK = 4  # additional requests in flight that a conversation's engine may have over the least loaded one


def least_loaded(free: Sequence[Engine], affinity: int) -> Engine:
    """Return the least loaded engine, or the conversation's own one if its load is not much higher.

    free: at least one. affinity: the conversation's number. Rendezvous hashing (Thaler and Ravishankar 1998): if an
    engine is lost, only its conversations move.
    """
    least = min(free, key=lambda engine: engine.in_flight)
    own = max(free, key=lambda engine: crc32(engine.name.encode(), affinity & 0xFFFFFFFF))
    return own if own.in_flight <= least.in_flight + SLACK else least
