"""The trainer's exceptions.

FlywheelError
└── TrainerError
    ├── UpdateError    an update failed: not finite, out of memory
    ├── RankLost       another rank is gone, or only this one failed
    ├── SaveError      a version or a state cannot be written
    └── Stopped        a stop was requested while the trainer waited for the ledger or for disk space
"""

from __future__ import annotations

from shared.errors import FlywheelError


class TrainerError(FlywheelError):
    """Base of the trainer's exceptions."""


class UpdateError(TrainerError):
    """An update failed. Its result must not be published; the weights in memory are no longer those before it."""


class RankLost(TrainerError):
    """The ranks no longer work in step. Each of them exits; a supervisor restarts all of them."""


class SaveError(TrainerError):
    """A version or a state cannot be written. No partial files remain. The process exits."""


class Stopped(TrainerError):
    """A stop was requested during a wait for the ledger or for disk space. The next start releases leased rows."""
