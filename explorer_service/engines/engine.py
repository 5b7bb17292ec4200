"""One engine: where it is, what it serves, in which state it is, and what it has in flight."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from explorer_service.engines.hold import Hold
from shared.experience import Sampling


class EngineState(StrEnum):
    UNAVAILABLE = "unavailable"  # does not answer
    CHECKING = "checking"  # answers; what it serves is not proven yet
    SERVING = "serving"  # proven to serve its versions
    DEGRADED = "degraded"  # serves an older version than it should, for the reason that it has
    RELOADING = "reloading"  # takes up a version; gets no new requests


OPEN = (EngineState.SERVING, EngineState.DEGRADED)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as the pool knows it."""

    name: str
    url: str
    state: EngineState = EngineState.CHECKING  # until its first answer: chats that come before it wait
    versions: dict[int, str] = field(default_factory=dict)  # what it serves: version → the model name it knows it by
    version: int | None = None  # the one of them that requests get which name none
    refused: dict[int, str] = field(default_factory=dict)  # pinned versions that it does not serve: version → why
    in_flight: int = 0
    in_flight_of: dict[int, int] = field(default_factory=dict)  # requests by version
    seeded_in_flight: int = 0  # with `seed`: a CPU engine may die when paused under one
    sampling_defaults: Sampling = field(default_factory=Sampling)  # what it applies where a request sets nothing
    reason: str = "not seen yet"
    answered_at: float = -math.inf  # time.monotonic(): a chat, or a part of one
    hold: Hold = field(default_factory=Hold)  # of the requests that it has
    # when it was noted, and since when, time.monotonic(), which version samples for requests that began under another
    switches: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def is_open(self) -> bool:
        """Whether it gets chats."""
        return self.state in OPEN
