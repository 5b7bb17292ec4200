"""A claimer that finds nothing is stopped by a number of its polls, not by a time."""

from __future__ import annotations

from shared.stop_request import StopRequest


class StopAfterPolls(StopRequest):
    """A stop request that comes once the claimer has waited so often for rows."""

    def __init__(self, polls: int) -> None:
        super().__init__()
        self._left = polls

    def wait(self, timeout_s: float) -> bool:
        self._left -= 1
        if not self._left:
            self.set()
        return super().wait(timeout_s)
