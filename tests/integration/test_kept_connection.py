"""A connection that one thread keeps: each write stands whole or not at all, whoever gave the statements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import DriverCursor, Ledger
from shared.ledger.tables import experiences, trainers
from tests.samples import sample


@pytest.fixture
def ledger(tmp_path, database_url):
    url = database_url or f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    opened = Ledger.open(url.replace("postgresql://", "postgresql+psycopg://"))
    yield opened
    opened.close()


def by_the_driver(connection: Connection, name: str) -> None:
    transitions.record(connection, [sample(name)])


def by_sqlalchemy(connection: Connection, name: str) -> None:
    connection.execute(insert(trainers).values(name=name, step=0, version=0, heartbeat_at=0.0))


def by_both(connection: Connection, name: str) -> None:
    by_the_driver(connection, name)
    by_sqlalchemy(connection, name)


def names(ledger: Ledger) -> set[str]:
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id)).scalars().all()
        return {*rows, *connection.execute(select(trainers.c.name)).scalars().all()}


@pytest.mark.parametrize("write", [by_the_driver, by_sqlalchemy, by_both])
def test_a_write_stands_for_others_when_it_returns(ledger, write: Callable[[Connection, str], None]):
    kept = ledger.keep()
    for name in ("a", "b"):
        kept.write(lambda connection, name=name: write(connection, name))
        assert name in names(ledger)
    kept.close()


@pytest.mark.parametrize("write", [by_the_driver, by_sqlalchemy, by_both])
def test_a_write_that_fails_leaves_nothing_behind(ledger, write: Callable[[Connection, str], None]):
    def fail(connection: Connection) -> None:
        write(connection, "never")
        raise ValueError("of the work")

    kept = ledger.keep()
    kept.write(lambda connection: write(connection, "before"))
    with pytest.raises(ValueError, match="of the work"):
        kept.write(fail)
    kept.write(lambda connection: write(connection, "after"))
    assert names(ledger) == {"before", "after"}
    kept.close()


def test_the_databases_refusals_keep_their_kind(ledger):
    kept = ledger.keep()
    kept.write(lambda connection: by_the_driver(connection, "once"))
    with pytest.raises(IntegrityError):
        kept.write(lambda connection: by_the_driver(connection, "once"))

    def nonsense(connection: Connection) -> None:
        with DriverCursor(connection) as cursor:
            cursor.execute("SELECT 1 FROM nowhere")

    with pytest.raises(LedgerError, match="nowhere"):
        kept.write(nonsense)
    kept.write(lambda connection: by_the_driver(connection, "again"))
    assert names(ledger) == {"once", "again"}
    kept.close()
