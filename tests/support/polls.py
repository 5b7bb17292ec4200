"""A claimer that finds nothing is stopped by a number of its polls, and its time is counted in them."""

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


class SecondAtEachPoll(StopRequest):
    """A clock in the place of `time` that goes on by a second whenever the claimer waits for rows."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        self.now_s += 1.0
        return bool(self)
