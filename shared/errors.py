"""The exceptions of Flywheel, one tree. Every message names the value, the reason and the mend.

FlywheelError
├── ConfigError      the configuration is wrong; the process ends with exit status 2
├── StartupError     the process cannot start or go on; exit status 1
├── LedgerError      the database is away or refuses
├── VersionError     a version folder is missing, incomplete or damaged
└── EngineError      an engine is away or answers wrongly
"""

from __future__ import annotations


class FlywheelError(Exception):
    """Base of every error that Flywheel raises on purpose."""

    exit_status = 1


class ConfigError(FlywheelError):
    """The configuration is wrong: names the key, the value and the mend."""

    exit_status = 2


class StartupError(FlywheelError):
    """A process cannot start: a port in use, a model folder away, a folder that cannot be written."""


class LedgerError(FlywheelError):
    """The database is away, full, locked too long or not ours."""


class VersionError(FlywheelError):
    """A version folder does not verify; `reason` says which file and why."""


class EngineError(FlywheelError):
    """An engine is away, or did not do what was asked."""
