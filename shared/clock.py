"""Periodic work of one process: tasks with equal periods run at the same moment, so that the process wakes up once."""

from __future__ import annotations

import random
import time

SHORT_SLEEP_S = 0.5  # suspension of a machine that is too short for others to take over what its processes own
_PHASE = random.random()  # differs between processes, so that they do not run in step


def asleep_s() -> float:
    """Return how long this machine has been suspended since it started; 0 if the kernel does not report it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # on Linux
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


def until_next_tick(period_s: float) -> float:
    """Return the seconds until this process's next tick of that period.

    If one period is a multiple of another, its ticks coincide with ticks of the shorter one.
    """
    left = period_s - (time.monotonic() + _PHASE) % period_s
    return left if left > period_s / 20 else left + period_s  # the process may wake up slightly early
