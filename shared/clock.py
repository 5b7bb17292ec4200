"""Periodic work of one process: what has the same period runs at the same moment, so that the process wakes once."""

from __future__ import annotations

import random
import time

SHORT_SLEEP_S = 0.5  # of a machine that was suspended: too short for others to take over what a process on it has
_PHASE = random.random()  # differs by process, so that processes do not tick together


def asleep_s() -> float:
    """For how long this machine has been suspended since it started; 0 where the kernel does not say."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux has one
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


def until_next_tick(period_s: float) -> float:
    """Seconds until this process's next tick of that period.

    Where one period is a multiple of another, its ticks coincide with ticks of the shorter one.
    """
    left = period_s - (time.monotonic() + _PHASE) % period_s
    return left if left > period_s / 20 else left + period_s  # the process may be awake a little early
