"""A request's place at an engine, and the versions that sampled its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from explorer_service.engines.hold import Hold

if TYPE_CHECKING:
    from explorer_service.engines.engine import Engine


@dataclass(slots=True)
class EngineSlot:
    """A request's place at an engine. Times are clock.since_boot_s()."""

    engine: Engine
    version: int  # in service there when the request began
    model: str  # that version's model name at the engine
    hold: Hold
    began_at: float
    seeded: bool = False
    early_hold: Hold | None = None  # if the engine was not open yet
    is_chat: bool = False  # counted in the metrics of chats
    first_at: float = -math.inf  # when the first part of a streamed answer arrived
    last_at: float = math.inf  # when the last read part arrived

    @property
    def first_version(self) -> int:
        """The version that sampled the first token; for a whole answer, the one in service when the request began."""
        return self._version_at(self.first_at)

    @property
    def last_version(self) -> int:
        """The version that sampled the last token."""
        return self._version_at(self.last_at)

    def _version_at(self, when: float) -> int:
        found = self.version
        for noted_at, since, version in self.engine.switches:
            if self.began_at < noted_at and since <= when:
                found = version
        return found
