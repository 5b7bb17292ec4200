"""The exceptions of Flywheel, one tree. Every message names the value, the reason and the remedy.

FlywheelError
├── ConfigError      the configuration is wrong; the process ends with exit status 2
├── StartupError     the process cannot start or go on; exit status 1
├── LedgerError      the database is unavailable or refuses
├── LeaseLost        another trainer holds the rows now
├── VersionError     a version folder is damaged, or holds what it must not
│   ├── VersionMissing   the folder or a part of it is not there, or not yet
│   └── VersionExchanged   the folder holds another version of this number than the ledger names
├── DiskFull         a version or a state does not fit on the disk
├── CorruptTokens    a row's token arrays do not agree (experience.py)
├── TooManySignals   so much was said about a row that it takes no more
├── TooManyTargets   feedback is about more rows than it may reach at once
└── EngineError      an engine is unavailable or answers wrongly
"""

from __future__ import annotations

import errno


class FlywheelError(Exception):
    """Base of every error that Flywheel raises on purpose."""

    exit_status = 1


class ConfigError(FlywheelError):
    """The configuration is wrong: names the key, the value and the remedy."""

    exit_status = 2


class StartupError(FlywheelError):
    """A process cannot start: a port in use, a missing model folder, a folder that cannot be written."""


class LedgerError(FlywheelError):
    """The database is unavailable, full, locked too long or not ours."""


class LeaseLost(FlywheelError):
    """A batch is no longer held by this trainer: its update must not become official."""


class VersionError(FlywheelError):
    """A version folder does not verify; `reason` says which file and why."""


class VersionMissing(VersionError):
    """A version's folder, or a file of it, is not there: for good, or not yet."""


class VersionExchanged(VersionError):
    """A version's manifest is not the one that the ledger names: of another ledger, or changed since."""


class DiskFull(FlywheelError):
    """The disk was full in the middle of a write; nothing half-written is left."""


def is_full(failure: Exception) -> bool:
    """Whether the operating system refused a write because the disk, or what one may use of it, is full."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)


class TooManySignals(FlywheelError):
    """A row's log is full: nothing more can be said about it."""


class TooManyTargets(FlywheelError):
    """More rows than feedback may reach at once."""


class EngineError(FlywheelError):
    """An engine is unavailable, or did not do what was asked."""
