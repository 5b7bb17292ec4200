"""A dedicated connection: each write is stored whole or not at all, whichever way its statements take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import DedicatedConnection, Ledger
from shared.ledger.tables import experiences, trainers
from tests.support.samples import sample


def by_driver_statements(connection: Connection, name: str) -> None:
    transitions.record(connection, [sample(name)])


def by_expressions(connection: Connection, name: str) -> None:
    connection.execute(insert(trainers).values(name=name, step=0, version=0, heartbeat_at=0.0))


def by_both(connection: Connection, name: str) -> None:
    by_driver_statements(connection, name)
    by_expressions(connection, name)


def names(ledger: Ledger) -> set[str]:
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id)).scalars().all()
        return {*rows, *connection.execute(select(trainers.c.name)).scalars().all()}


@pytest.mark.parametrize("write", [by_driver_statements, by_expressions, by_both])
def test_others_see_a_write_when_it_returns(ledger, write: Callable[[Connection, str], None]):
    dedicated = DedicatedConnection(ledger)
    for name in ("a", "b"):
        dedicated.write(lambda connection, name=name: write(connection, name))
        assert name in names(ledger)
    dedicated.close()


@pytest.mark.parametrize("write", [by_driver_statements, by_expressions, by_both])
def test_a_write_that_fails_leaves_nothing_behind(ledger, write: Callable[[Connection, str], None]):
    def fail(connection: Connection) -> None:
        write(connection, "never")
        raise ValueError("of the work")

    dedicated = DedicatedConnection(ledger)
    dedicated.write(lambda connection: write(connection, "before"))
    with pytest.raises(ValueError, match="of the work"):
        dedicated.write(fail)
    dedicated.write(lambda connection: write(connection, "after"))
    assert names(ledger) == {"before", "after"}
    dedicated.close()


def test_the_databases_refusals_keep_their_kind(ledger):
    dedicated = DedicatedConnection(ledger)
    dedicated.write(lambda connection: by_driver_statements(connection, "once"))
    with pytest.raises(IntegrityError):
        dedicated.write(lambda connection: by_driver_statements(connection, "once"))

    def nonsense(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT 1 FROM nowhere")

    with pytest.raises(LedgerError, match="nowhere"):
        dedicated.write(nonsense)
    dedicated.write(lambda connection: by_driver_statements(connection, "again"))
    assert names(ledger) == {"once", "again"}
    dedicated.close()


def test_fetch_gives_the_result_of_a_query_and_ends_its_transaction(ledger):
    dedicated = DedicatedConnection(ledger)

    def newest(connection: Connection) -> str | None:
        return connection.execute(select(experiences.c.msg_id).order_by(experiences.c.id.desc())).scalar()

    assert dedicated.fetch(newest) is None
    with ledger.write() as connection:
        by_driver_statements(connection, "a")
    assert dedicated.fetch(newest) == "a"
    with pytest.raises(LedgerError, match="nowhere"):
        dedicated.fetch(lambda connection: connection.exec_driver_sql("SELECT 1 FROM nowhere"))
    assert dedicated.fetch(newest) == "a"
    dedicated.close()
