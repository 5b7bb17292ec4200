"""Opening the ledger: SQLite or PostgreSQL, durable, with errors one can act on.

SQLite runs with WAL and synchronous=FULL: a committed transaction survives a power cut. Every writing transaction
begins with BEGIN IMMEDIATE, so that two writers queue instead of failing half-way.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import make_url

from shared.errors import LedgerError
from shared.ledger.migrate import bring_to_head

T = TypeVar("T")
BUSY_TIMEOUT_S = 30.0
_FRESH_S = 2.0  # a connection that rested longer may have lost its server meanwhile
_DATABASE_ERRORS = (exc.DBAPIError, exc.TimeoutError, exc.ArgumentError)
_MENDS = (
    ("disk is full", "free space there"),
    ("locked", "end whatever holds it"),
    ("readonly", "mend its permissions"),
    ("not a database", "restore it, or choose another root_dir"),
)


class Ledger:
    """A database with our tables. `read()` and `write()` give a connection in a transaction.

    Blocking: call it from a thread where an event loop runs.
    """

    def __init__(self, engine: Engine, shown_url: str) -> None:
        self._engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.shown_url = shown_url  # without the password
        self._errors = _ClearErrors(shown_url)

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Connect and bring the schema to this version. Raises LedgerError when the database is away or refuses."""
        parsed = make_url(url)
        shown = parsed.render_as_string(hide_password=True)
        if parsed.get_backend_name() == "sqlite":
            if parsed.database:
                _make_folder(Path(parsed.database).parent)
            engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False})
            event.listen(engine, "connect", _prepare_sqlite)
        else:
            engine = create_engine(
                parsed,
                connect_args={"client_encoding": "utf8"},  # without it a server of SQL_ASCII gives bytes for text
                pool_size=5,
                max_overflow=5,
                pool_pre_ping=True,
                pool_timeout=BUSY_TIMEOUT_S,
            )
        ledger = cls(engine, shown)
        try:
            with ledger._errors, ledger._begin("IMMEDIATE") as connection:
                if engine.dialect.name == "postgresql":  # two processes creating the same tables at once
                    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(732160)")
                bring_to_head(connection)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read-only transaction: one consistent snapshot."""
        with self._errors, self._begin("DEFERRED") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A writing transaction: durable when the block ends, undone when it raises."""
        with self._errors, self._begin("IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _begin(self, mode: str) -> Iterator[Connection]:
        with self._engine.connect() as connection, connection.begin():
            if self.is_sqlite:
                connection.exec_driver_sql(f"BEGIN {mode}")  # the driver is in autocommit: this is the real one
            yield connection

    def keep(self) -> KeptConnection:
        """A connection for one thread that writes or asks all the time."""
        return KeptConnection(self)

    def close(self) -> None:
        self._engine.dispose()


class _ClearErrors:
    """`with` it: what SQLAlchemy raises ends as LedgerError, which says what is wrong and what to do."""

    def __init__(self, shown_url: str) -> None:
        self._shown_url = shown_url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, _DATABASE_ERRORS) or isinstance(error, exc.IntegrityError):
            return
        cause = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
        mend = next((mend for symptom, mend in _MENDS if symptom in cause), "is it up and reachable?")
        raise LedgerError(f"the database {self._shown_url} is away or refuses ({cause}); {mend}") from error


class KeptConnection:
    """A connection that stays out of the pool from one transaction to the next; for one thread at a time.

    (Taking one out and putting it back took 58 µs of CPU, and all the rest of storing one chat 115: warm, on SQLite.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._connection: Connection | None = None
        self._used_at = 0.0  # time.monotonic()

    def write(self, work: Callable[[Connection], T]) -> T:
        """`work` in a writing transaction: durable when this returns, undone when it raises, as in Ledger.write()."""
        with self._ledger._errors, self as connection, DriverCursor(connection) as cursor:
            if self._ledger.is_sqlite:
                cursor.execute("BEGIN IMMEDIATE")
            result = work(connection)
            if connection.in_transaction():  # as SQLAlchemy sees it: `work` gave it a statement
                connection.commit()
            else:
                cursor.commit()
            return result

    def ask(self, statement: str) -> Sequence[Any] | None:
        """The first row of a query, by the driver alone: for a question that is asked all the time."""
        with self._ledger._errors, self as connection, DriverCursor(connection) as cursor:
            found = cursor.execute(statement)
            row: Sequence[Any] | None = found.fetchone()
            if not self._ledger.is_sqlite:
                found.connection.rollback()  # it began a transaction by itself
            return row

    def __enter__(self) -> Connection:
        return self._take()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._used_at = time.monotonic()
        else:
            self.close()  # what it had begun is undone

    def _take(self) -> Connection:
        if not self._ledger.is_sqlite and time.monotonic() - self._used_at > _FRESH_S:
            self.close()  # the pool tries it before it gives it out again
        if self._connection is None:
            self._connection = self._ledger._engine.connect()
        return self._connection

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class DriverCursor:
    """`with DriverCursor(connection) as cursor:` — the driver's own, for the hot path and for what SQLAlchemy does not
    offer. Raises SQLAlchemy's errors all the same.

    (Storing a chat took 160 µs of CPU with SQLAlchemy's way to BEGIN and the inserts, 127 with this: warm, on SQLite.)
    """

    __slots__ = ("_connection", "_cursor")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> DriverCursor:
        try:
            self._cursor = self._connection.connection.cursor()
        except self._connection.dialect.loaded_dbapi.Error as error:
            raise self._translated(error) from error
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._cursor.close()
        if isinstance(error, self._connection.dialect.loaded_dbapi.Error):
            raise self._translated(error) from error

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a statement in the driver's words; the driver's cursor, with what it found."""
        return self._cursor.execute(statement, parameters)

    def execute_each(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run it with each of these."""
        if len(rows) == 1:
            self._cursor.execute(statement, rows[0])
        else:
            self._cursor.executemany(statement, rows)

    def copy_rows(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """PostgreSQL's COPY ... FROM STDIN."""
        with self._cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)

    def commit(self) -> None:
        """End the driver's transaction."""
        self._cursor.connection.commit()

    def _translated(self, error: Exception) -> Exception:
        connection, dialect = self._connection, self._connection.dialect
        if dialect.is_disconnect(error, connection.connection.dbapi_connection, None):  # type: ignore[arg-type]
            connection.invalidate(error)  # SQLAlchemy has not seen it, and would try to roll it back
        return exc.DBAPIError.instance(None, None, error, dialect.loaded_dbapi.Error, dialect=dialect)


def driver_mark(connection: Connection) -> str:
    """What stands for a parameter in the driver's statements."""
    return "?" if connection.dialect.paramstyle == "qmark" else "%s"


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves; the driver's own would be DEFERRED
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={int(BUSY_TIMEOUT_S * 1000)}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc_:
        raise LedgerError(f"the folder {folder} cannot be made ({exc_.strerror}); choose another root_dir") from exc_
