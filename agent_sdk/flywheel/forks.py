"""Renewal after a fork: a forked process has no threads of its parent's, and must not use its connections."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object with threads or connections."""

    def renew(self) -> None:
        """Called in a forked process, before anything else runs there."""


_all: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_after_fork(one: Forked) -> None:
    """Have an object renewed in each forked process."""
    _all.add(one)


def _renew_all() -> None:
    for one in list(_all):
        one.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)
