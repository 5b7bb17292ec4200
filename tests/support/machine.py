"""A machine that sleeps, as its processes see it when it is awake again."""

from __future__ import annotations

import time

import pytest

from shared import clock


class Machine:
    """`sleep` is over at once. time.monotonic() stands still meanwhile, as on a real machine; other clocks go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._slept_s = 0.0
        since_boot_s, wall_time = clock.since_boot_s, time.time
        patch.setattr(clock, "since_boot_s", lambda: since_boot_s() + self._slept_s)
        patch.setattr(time, "time", lambda: wall_time() + self._slept_s)

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds


@pytest.fixture
def sleeping_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of this process."""
    return Machine(monkeypatch)
