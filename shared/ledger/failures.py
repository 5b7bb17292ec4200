"""Classifies database errors by their codes: SQLSTATE of PostgreSQL, result code of SQLite.

Either the database itself fails, and with it everything that waits for it; or it refuses one statement; or two
transactions conflict, and one of them must be repeated.
"""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError

# connection exception, insufficient resources, operator intervention (shutdown), system error, internal error
_FAILING_CLASSES = ("08", "53", "57P", "58", "XX")
_READ_ONLY = "25006"  # a standby, or a demoted primary
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_LOCK_TIMEOUT = "55P03"
_REFUSALS = frozenset((  # result codes of SQLite that concern one statement
    sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
))  # fmt: skip
_LOST = frozenset((
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
))  # fmt: skip


def is_of_the_database(error: DBAPIError) -> bool:
    """Whether the database itself fails: unavailable, full, locked or damaged. Otherwise it refuses one statement."""
    if error.connection_invalidated:
        return True
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = _result_code(cause)
        return code is not None and code not in _REFUSALS
    state = _state(error)  # None: the driver rejected the values before it sent them
    return state is not None and (state == _READ_ONLY or state.startswith(_FAILING_CLASSES))


def is_conflict(error: BaseException | None) -> bool:
    """Whether the transaction must be repeated: a deadlock, or a serialization failure."""
    return isinstance(error, DBAPIError) and _state(error) in _CONFLICTS


def is_lock_timeout(error: BaseException | None) -> bool:
    """Whether another transaction locked a row for longer than ours waits (PostgreSQL)."""
    return isinstance(error, DBAPIError) and _state(error) == _LOCK_TIMEOUT


def has_lost_its_file(error: BaseException) -> bool:
    """Whether SQLite's connection cannot be used again: its file is missing, damaged or not writable."""
    return isinstance(error, sqlite3.Error) and _result_code(error) in _LOST


def _state(error: DBAPIError) -> str | None:
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state


def _result_code(error: sqlite3.Error) -> int | None:
    """Return the primary result code; None for an error of Python's own module."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
