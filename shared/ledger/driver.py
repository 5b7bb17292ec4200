"""SQLAlchemy's engine for SQLite or PostgreSQL, with time limits on its connections.

SQLite runs with WAL and synchronous=FULL: a committed transaction survives a power cut. Deleted data is overwritten
with zeros. Before each transaction, a connection checks that its database file was not moved or deleted.
"""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import psycopg
from psycopg.abc import PQGen
from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, exc

from shared.ledger.failures import has_lost_its_file

T = TypeVar("T")
_PAUSE_S = 0.01  # between two attempts to set SQLite's journal mode
_FILE = "flywheel_file"  # key in a connection's info: the file that it opened


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a process for its database, in seconds."""

    connect_s: float
    lock_s: float  # for a lock of a row (PostgreSQL)
    file_lock_s: float  # for the lock of the database (SQLite)
    answer_s: float | None  # for one statement (PostgreSQL); None: no limit
    idle_s: float  # idle time after which PostgreSQL ends a transaction


OPERATOR = Patience(connect_s=10, lock_s=60, file_lock_s=60, answer_s=None, idle_s=3600)  # for commands and the trainer


def answering_within(seconds: float) -> Patience:
    """Return limits for a process that must tell its callers within this time that the database does not answer."""
    half = seconds / 2  # for a connection that does not answer, and then for a new one
    return Patience(connect_s=half, lock_s=half * 3 / 4, file_lock_s=seconds * 7 / 8, answer_s=half, idle_s=60)


def make_engine(url: URL, patience: Patience, *, create: bool) -> Engine:
    """create: create SQLite's file if there is none; otherwise a missing file is a database error."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, patience, create)
    return _postgresql(url, patience)


def _sqlite(url: URL, patience: Patience, create: bool) -> Engine:
    engine = create_engine(url, connect_args={"timeout": patience.file_lock_s, "check_same_thread": False})
    file = Path(url.database) if url.database and url.database != ":memory:" else None

    def connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
        if file is None or create:
            return None  # SQLAlchemy connects
        return sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=rw", uri=True, **options)

    def prepare(connection: sqlite3.Connection, record: Any) -> None:
        prepare_sqlite(connection, patience)
        if file is not None:
            record.info[_FILE] = _File(str(file), _identity(str(file)))

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "connect", prepare)
    event.listen(engine, "handle_error", _reopen)
    return engine


def prepare_sqlite(connection: sqlite3.Connection, patience: Patience) -> None:
    """Configure a new connection."""
    connection.isolation_level = None  # Ledger issues BEGIN; the driver's own would be DEFERRED
    _use_wal(connection, patience.file_lock_s)
    for pragma in (
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",
        f"busy_timeout={int(patience.file_lock_s * 1000)}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _use_wal(connection: sqlite3.Connection, seconds: float) -> None:
    """Set the journal mode, which SQLite refuses without waiting while another connection begins the same database."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the rest of an extended code says why
            if not is_busy or time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)


def require_same_file(connection: Connection) -> None:
    """Raise OperationalError if SQLite's file is not the one that this connection opened.

    SQLite itself would continue to write to a file that no other process can find.
    """
    opened: _File | None = connection.info.get(_FILE)
    if opened is not None and opened.identity != _identity(opened.name):
        connection.invalidate()
        raise exc.OperationalError(
            None, None, sqlite3.OperationalError(f"{opened.name} was moved, deleted or replaced")
        )


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    identity: tuple[int, int]


def _identity(name: str) -> tuple[int, int]:
    """Return which file has this name now."""
    try:
        about = os.stat(name)  # noqa: PTH116 — called before every transaction; a Path is several times slower
    except OSError:
        return 0, 0
    return about.st_dev, about.st_ino


def _reopen(context: ExceptionContext) -> None:
    """Discard a connection whose file failed."""
    if has_lost_its_file(context.original_exception):
        context.is_disconnect = True


def _postgresql(url: URL, patience: Patience) -> Engine:
    milliseconds = {"lock_timeout": patience.lock_s, "idle_in_transaction_session_timeout": patience.idle_s}
    if patience.answer_s is not None:
        milliseconds["statement_timeout"] = patience.answer_s
    options: dict[str, Any] = {
        "client_encoding": "utf8",  # without it, a server with SQL_ASCII returns bytes for text
        "connect_timeout": max(2, round(patience.connect_s)),  # libpq treats 1 as 2
        "tcp_user_timeout": round(1000 * patience.connect_s),  # milliseconds until sent data must be acknowledged
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "options": " ".join(f"-c {name}={round(1000 * seconds)}" for name, seconds in milliseconds.items()),
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in options.items() if name not in url.query},
        pool_size=5,
        max_overflow=5,
        pool_pre_ping=True,
        pool_timeout=patience.lock_s,
    )

    def connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
        try:
            connection = _ImpatientConnection.connect(*arguments, **options)
        except UnicodeError as error:  # a label of the name is empty or too long
            raise psycopg.OperationalError("its host is no host name") from error
        connection.answer_s = patience.answer_s
        return connection

    event.listen(engine, "do_connect", connect)
    return engine


class _ImpatientConnection(psycopg.Connection[Any]):
    """A connection that is closed if the server does not answer in time.

    The server's own timeouts do not help if it is frozen, and TCP does not detect that: the kernel still responds.
    """

    answer_s: float | None = None

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Like psycopg's. After `answer_s`, closes the connection and raises psycopg.OperationalError."""
        limit = self.answer_s if timeout is None else timeout
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError as error:
            if self.pgconn.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                raise
            self.close()  # in the middle of an exchange, it cannot be used again
            raise psycopg.OperationalError(f"the server did not answer within {limit:g} s") from error
