"""A clock that goes on while the machine sleeps, and the ticks of a process's periodic work."""

from __future__ import annotations

import random
import time
from functools import partial

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first on Linux, where only it counts suspension
_PHASE = random.random()  # differs between processes, so that they do not run in step


# For times that are compared with what other machines did meanwhile; time.monotonic() stands still during suspension.
since_boot_s = partial(time.clock_gettime, _CLOCK)


def until_next_tick(period_s: float) -> float:
    """Return the seconds until this process's next tick of that period.

    Tasks with equal periods run at the same moment, so that the process wakes up once. If one period is a multiple of
    another, its ticks coincide with ticks of the shorter one.
    """
    left = period_s - (time.monotonic() + _PHASE) % period_s
    return left if left > period_s / 20 else left + period_s  # the process may wake up slightly early
