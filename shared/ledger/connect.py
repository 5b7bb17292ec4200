"""Opens the ledger: SQLite or PostgreSQL, durable, with errors that name a remedy.

Owns every connection and every transaction; driver.py makes the connections. On SQLite, a write transaction begins with
BEGIN IMMEDIATE, so that two writers queue instead of failing half-way. It locks the database, and SQLAlchemy omits FOR
UPDATE there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Column, ColumnElement, Connection, Engine, Table, exc, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url

from shared import clock
from shared.errors import LedgerError
from shared.ledger.driver import OPERATOR, Patience, make_engine, require_same_file
from shared.ledger.migrate import bring_to_head, schema_version
from shared.ledger.writer_queue import WriterQueue
from shared.log import StageLogger

log = StageLogger("ledger")
T = TypeVar("T")
_IDLE_S = 2.0  # after a longer pause, a dedicated connection may have lost its server
COPY_ROWS = 16  # number of rows from which PostgreSQL's COPY is faster than inserts
_ATTEMPT_MS = 50  # to empty SQLite's log
_PAUSE_S = 0.2  # between two attempts
_DATABASE_ERRORS = (exc.DBAPIError, exc.TimeoutError, exc.ArgumentError)
_HELD = "end whatever holds it; if a process of a newer Flywheel migrates the ledger, wait for it"
_CROWDED = "raise PostgreSQL's max_connections, or lower explorer.workers; each process opens up to ten connections"
_REMEDIES = (
    ("disk is full", "free space there"),
    ("No space left", "free space there"),
    ("too many clients", _CROWDED),
    ("connection slots", _CROWDED),
    ("locked", _HELD),
    ("lock timeout", _HELD),
    ("moved, deleted or replaced", "put it back"),
    ("unable to open", "put it back, or correct its permissions"),
    ("readonly", "correct its permissions"),
    ("permission denied", "grant its user that right"),
    ("authentication failed", "correct user and password in database_url"),
    ("does not exist", "create it, or correct database_url"),
    ("no host name", "correct database_url"),
    ("not a database", "restore it, or choose another root_dir"),
)


class Ledger:
    """A database with our tables. `read()` and `write()` open a transaction and return its connection.

    Blocking: call it from a thread if an event loop is running.
    """

    def __init__(self, engine: Engine, shown_url: str) -> None:
        self._engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.shown_url = shown_url  # without passwords
        file = engine.url.database if self.is_sqlite else None
        self._queue = None if file in (None, "", ":memory:") else WriterQueue(Path(file))

    @classmethod
    def open(cls, url: str, patience: Patience = OPERATOR, *, create: bool = True) -> Ledger:
        """Connect, and migrate the schema to this version. Raises LedgerError if the database cannot be used.

        patience: time limits of later statements; a migration has no limit.
        create: create the ledger if there is none; otherwise a missing ledger is an error.
        """
        parsed = make_url(url)
        shown_url = _shown(parsed)
        remedy = "correct root_dir or database_url, or start `flywheel up` first"
        absent = LedgerError(f"{shown_url} holds no ledger; {remedy}")
        if parsed.get_backend_name() == "sqlite" and parsed.database:
            if not create and not Path(parsed.database).exists():
                raise absent
            _make_folder(Path(parsed.database).parent)
        migrating = cls(make_engine(parsed, OPERATOR, create=True), shown_url)
        try:
            with migrating.write() as connection:
                if not migrating.is_sqlite:  # two processes may create the same tables at once
                    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(732160)")
                is_new = schema_version(connection) is None
                if is_new and not create:
                    raise absent
                bring_to_head(connection)
        finally:
            migrating.close()
        if is_new:
            log.info("a new ledger begins", url=shown_url)
        return cls(make_engine(parsed, patience, create=False), shown_url)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read-only transaction with one consistent snapshot."""
        with self._as_ledger_error(), self._engine.connect() as connection:
            if not self.is_sqlite:  # SQLite's default is such a snapshot
                connection.execution_options(isolation_level="REPEATABLE READ")
            with self._transaction(connection, "DEFERRED"):
                yield connection

    def fetch(self, query: Callable[[Connection], T]) -> T:
        """What a query finds, in a snapshot of its own."""
        with self.read() as connection:
            return query(connection)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a write transaction: durable when the block ends, rolled back when it raises."""
        with self._as_ledger_error(), self._engine.connect() as connection, self._transaction(connection, "IMMEDIATE"):
            yield connection

    @contextmanager
    def _transaction(self, connection: Connection, mode: str) -> Iterator[None]:
        """Begin and end a transaction. All transactions pass through here."""
        if self.is_sqlite:
            require_same_file(connection)
        with connection.begin():
            if self.is_sqlite:  # the driver is in autocommit mode and does not begin one
                with self._queued(mode):
                    connection.exec_driver_sql(f"BEGIN {mode}")
            yield

    def _queued(self, mode: str) -> AbstractContextManager[None]:
        """Let a writer wait in the queue of writers; a reader does not need to."""
        return nullcontext() if self._queue is None or mode != "IMMEDIATE" else self._queue.at_head()

    @contextmanager
    def _as_ledger_error(self) -> Iterator[None]:
        """Convert the database's errors to LedgerError, with cause and remedy, except IntegrityError."""
        try:
            yield
        except exc.IntegrityError:
            raise
        except _DATABASE_ERRORS as error:
            cause = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
            remedy = next((remedy for symptom, remedy in _REMEDIES if symptom in cause), "is it up and reachable?")
            raise LedgerError(f"the database {self.shown_url} is unavailable or refuses ({cause}); {remedy}") from error

    def empty_log(self, wait_s: float = 60.0) -> bool:
        """Checkpoint SQLite's write-ahead log and truncate it. Returns False if others prevent it for wait_s.

        While an attempt waits for readers to end, others cannot write, so each attempt is short.
        """
        if not self.is_sqlite:
            return True
        until = time.monotonic() + wait_s
        with self._as_ledger_error(), self._engine.connect() as connection:
            connection.detach()  # not to be pooled with this time limit
            connection.exec_driver_sql(f"PRAGMA busy_timeout={_ATTEMPT_MS}")
            while True:
                busy, _, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
                if not busy or time.monotonic() >= until:
                    return not busy
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        self._engine.dispose()
        if self._queue is not None:
            self._queue.close()


class DedicatedConnection:
    """A connection that stays outside the pool between transactions; for one thread at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._connection: Connection | None = None
        self._used_at = 0.0  # time.monotonic()

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a write transaction: durable when this returns, rolled back when it raises."""
        ledger = self._ledger
        with ledger._as_ledger_error(), self as connection, ledger._transaction(connection, "IMMEDIATE"):
            return work(connection)

    def fetch(self, query: Callable[[Connection], T]) -> T:
        """Return the result of a query."""
        ledger = self._ledger
        with ledger._as_ledger_error(), self as connection, ledger._transaction(connection, "DEFERRED"):
            return query(connection)

    def __enter__(self) -> Connection:
        if not self._ledger.is_sqlite and time.monotonic() - self._used_at > _IDLE_S:
            self.close()  # the pool tests a connection before it is used again
        if self._connection is None:
            self._connection = self._ledger._engine.connect()
        return self._connection

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._used_at = time.monotonic()
        else:
            self.close()

    def close(self) -> None:
        """Return the connection to the pool."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def copy_rows(connection: Connection, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run PostgreSQL's COPY ... FROM STDIN, which SQLAlchemy does not support. Raises SQLAlchemy's errors."""
    driver: Any = connection.connection.dbapi_connection
    driver_error = connection.dialect.loaded_dbapi.Error
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)
    except driver_error as error:
        if driver.closed:
            connection.invalidate(error)  # a rollback would fail
        raise exc.DBAPIError.instance(statement, None, error, driver_error, dialect=connection.dialect) from error


def insert_into(connection: Connection, table: Table) -> Any:
    """The INSERT of this kind of database, which can say ON CONFLICT."""
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)


def lock_rows(
    connection: Connection, key: Column[int], *where: ColumnElement[bool], newest_first: bool = False
) -> None:
    """Lock rows in the order of this key until the transaction ends (PostgreSQL; on SQLite it has all locks).

    Transactions that lock a table's rows in the same order do not deadlock. Rows of `experiences` are locked in
    ascending order, those of `payloads` in descending order.
    """
    if connection.dialect.name == "postgresql":
        order = key.desc() if newest_first else key
        connection.execute(select(key).where(*where).order_by(order).with_for_update()).all()


def wait_no_more(connection: Connection) -> None:
    """Limit this transaction's further waits for locks to a minimum (PostgreSQL; on SQLite it has all locks)."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL lock_timeout = '50ms'")


def plan_by_values(connection: Connection) -> None:
    """Make PostgreSQL plan statements with very many values for these values, and not once for all by rough estimates.

    A generic plan may compare every row of the table with every value.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL plan_cache_mode = force_custom_plan")


def database_time(connection: Connection) -> float:
    """Return Unix seconds by the clock that all users of the ledger share: PostgreSQL's, or that of SQLite's host."""
    if connection.dialect.name != "postgresql":
        return time.time()
    return float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())::float8").scalar_one())


def database_clock(connection: Connection) -> float:
    """Return by how many seconds `database_time` is ahead of this machine's clock.since_boot_s()."""
    before, now = clock.since_boot_s(), database_time(connection)
    return now - (before + clock.since_boot_s()) / 2


def placeholder(connection: Connection) -> str:
    """Return the driver's placeholder for a parameter."""
    return "?" if connection.dialect.paramstyle == "qmark" else "%s"


def _shown(url: URL) -> str:
    """Return a database's URL without passwords; of the options in its query, only those that name the server."""
    named = {name: value for name, value in url.query.items() if name in ("host", "port", "dbname")}
    return url.set(query=named).render_as_string(hide_password=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc_:
        raise LedgerError(f"the folder {folder} cannot be made ({exc_.strerror}); choose another root_dir") from exc_
