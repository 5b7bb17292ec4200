"""The state of one engine: its address, the versions that it serves, and its requests in flight."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from explorer_service.engines.hold import Hold
from shared.experience import Sampling


class EngineState(StrEnum):
    UNAVAILABLE = "unavailable"  # does not answer
    CHECKING = "checking"  # answers, but its version is not proven yet
    SERVING = "serving"  # its versions are proven
    DEGRADED = "degraded"  # serves an older version than it should; see `reason`
    RELOADING = "reloading"  # takes up a version; gets no new requests


OPEN = (EngineState.SERVING, EngineState.DEGRADED)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine of the pool."""

    name: str
    url: str
    state: EngineState = EngineState.CHECKING  # before its first answer, so that early chats wait
    versions: dict[int, str] = field(default_factory=dict)  # that it serves; version → model name at the engine
    version: int | None = None  # the version for requests that name none
    refused: dict[int, str] = field(default_factory=dict)  # pinned versions that it does not serve; version → reason
    in_flight: int = 0
    in_flight_of: dict[int, int] = field(default_factory=dict)  # requests by version
    seeded_in_flight: int = 0  # requests with `seed`: a CPU engine may die if it is paused during one
    sampling_defaults: Sampling = field(default_factory=Sampling)  # for fields that a request does not set
    reason: str = "not checked yet"
    closed_at: float = -math.inf  # time.monotonic(): when it was last closed for a take-up
    answered_at: float = -math.inf  # time.monotonic(): when it last sent a chat's reply, or a part of one
    hold: Hold = field(default_factory=Hold)  # shared by its requests in flight
    early_places: int = 0  # waiting chats that it still gets before it has proven; more would delay the proof
    early_hold: Hold = field(default_factory=Hold)  # shared by these, until it is open
    # (noted at, valid since, version): changes of weights under requests in flight; times are clock.since_boot_s()
    switches: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def is_open(self) -> bool:
        """Whether it gets chats."""
        return self.state in OPEN
