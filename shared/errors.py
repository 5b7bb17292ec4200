"""The exceptions of Flywheel, in one tree. Every message names the value, the reason and the remedy.

FlywheelError
├── ConfigError      the configuration is wrong; the process exits with status 2
├── StartupError     the process cannot start or continue; exit status 1
├── LedgerError      the database is unavailable or refuses a statement
├── LeaseLost        another trainer has leased the rows
├── CannotRollBack   a version cannot be returned to
├── CannotServe      a version cannot get chats
├── RolledBack       an operator has returned a trainer to an earlier version
├── VersionError     a version folder is damaged, or contains forbidden files
│   ├── VersionMissing   the folder or a part of it is missing, or not there yet
│   └── VersionExchanged   the folder contains another version of this number than the ledger
├── DiskFull         a version or a state does not fit on the disk
├── CorruptTokens    a row's token arrays do not agree (experience.py)
├── TooManySignals   a row's log of signals is full
├── TooManyTargets   feedback targets more rows than allowed
└── EngineError      an engine is unavailable or returns a wrong answer
"""

from __future__ import annotations

import errno


class FlywheelError(Exception):
    """Base of all errors that Flywheel raises intentionally."""

    exit_status = 1


class ConfigError(FlywheelError):
    """The configuration is wrong. The message names the key, the value and the remedy."""

    exit_status = 2


class StartupError(FlywheelError):
    """A process cannot start: a port in use, a model that cannot be loaded, a folder that cannot be written."""


class LedgerError(FlywheelError):
    """The database is unavailable, full, locked for too long, or has foreign tables."""


class LeaseLost(FlywheelError):
    """This trainer no longer has the lease of a batch; its update must not be committed."""


class CannotRollBack(FlywheelError):
    """A version cannot be returned to: it has never served, or its files are gone."""


class CannotServe(FlywheelError):
    """A version cannot get the chats that an operator wants to send to it."""


class RolledBack(FlywheelError):
    """An operator has returned this trainer to an earlier version; it must start again from there."""


class VersionError(FlywheelError):
    """A version folder does not verify; the message names the file and the reason."""


class VersionMissing(VersionError):
    """A version's folder, or a file in it, is missing: permanently, or not there yet."""


class VersionExchanged(VersionError):
    """A version's manifest is not the one in the ledger: it belongs to another ledger, or was changed."""


class DiskFull(FlywheelError):
    """The disk filled up during a write. No partial files remain."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]


def is_full(failure: Exception) -> bool:
    """Whether the operating system refused a write because the disk, or a quota, is full."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)


class TooManySignals(FlywheelError):
    """A row's log of signals is full: it accepts no more."""


class TooManyTargets(FlywheelError):
    """Feedback targets more rows than allowed."""


class EngineError(FlywheelError):
    """An engine is unavailable, or did not execute a request."""
