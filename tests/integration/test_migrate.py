"""Schema steps and copying, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text

from services.operate import migrate
from shared.config import ledger_url
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.migrate import run_steps, schema_version
from shared.ledger.migrations import HEAD
from shared.ledger.queries import count_by_state
from shared.ledger.tables import experiences, metadata, payloads
from tests.experiences import record_ready
from tests.integration.test_claim import rows
from tests.servers import make_config


@pytest.fixture
def url(tmp_path, database_url) -> str:
    return ledger_url(database_url or f"sqlite:///{tmp_path / 'ledger.sqlite3'}")


def test_the_steps_lead_to_the_tables_that_the_code_knows(url):
    ledger = Ledger.open(url)
    with ledger.read() as connection:
        assert schema_version(connection) == HEAD
        context = MigrationContext.configure(connection, opts={"include_object": _can_change})
        assert compare_metadata(context, metadata) == []
    ledger.close()


def _can_change(thing: Any, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:
    """All but the foreign key that SQLite cannot drop (migration 0005)."""
    return not (kind == "foreign_key_constraint" and name is None and thing.column_keys == ["batch_id"])


def test_opening_again_changes_nothing_and_keeps_the_rows(url):
    ledger = Ledger.open(url)
    record_ready(ledger, rows(3))
    ledger.close()
    again = Ledger.open(url)
    with again.read() as connection:
        assert count_by_state(connection)["READY"] == 3
    again.close()


def test_a_ledger_of_the_first_schema_is_brought_to_this_one_with_its_rows(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0001")
        before = {index["name"] for index in inspect(connection).get_indexes("experiences")}
    engine.dispose()
    ledger = Ledger.open(url)
    record_ready(ledger, rows(3))
    with ledger.read() as connection:
        after = {index["name"] for index in inspect(connection).get_indexes("experiences")}
        assert after - before == {"ix_experiences_rewarded"}
        assert count_by_state(connection)["READY"] == 3
    ledger.close()


def test_a_ledger_of_a_newer_flywheel_is_refused(url):
    ledger = Ledger.open(url)
    with ledger.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    ledger.close()
    with pytest.raises(LedgerError, match="a newer one made it; upgrade this one"):
        Ledger.open(url)


def test_a_strangers_table_is_left_alone(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE experiences (thesis TEXT)"))
    engine.dispose()
    with pytest.raises(LedgerError, match="not ours"):
        Ledger.open(url)


def test_a_ledger_moves_to_another_database_whole(tmp_path, postgres, capsys):
    """SQLite to PostgreSQL and back, every row and every byte; and new rows go on after the old ones."""
    first, there, back = tmp_path / "first", postgres.new_database(), tmp_path / "back"
    config = make_config(first, ["http://127.0.0.1:1"])
    source = Ledger.open(config.ledger_url)
    record_ready(source, rows(2500))
    with source.write() as connection:
        transitions.claim(connection, owner="t", at_least=1, at_most=8, lease_s=60)
        before = content(connection)
    source.close()
    assert migrate(config, there) == 0
    assert migrate(config.model_copy(update={"database_url": there}), f"sqlite:///{back}.sqlite3") == 0
    returned = Ledger.open(f"sqlite:///{back}.sqlite3")
    with returned.read() as connection:
        assert content(connection) == before
    returned.close()
    moved = Ledger.open(ledger_url(there))
    record_ready(moved, rows(1, name="new"))
    with moved.read() as connection:
        assert connection.execute(select(experiences.c.id).order_by(experiences.c.id.desc())).scalars().first() == 2501
    moved.close()
    with pytest.raises(LedgerError, match="holds rows already"):
        migrate(config, there)
    assert "copied and verified" in capsys.readouterr().out


def content(connection) -> list[tuple[object, ...]]:
    query = select(experiences, payloads.c.tokens).join(payloads).order_by(experiences.c.id)
    return [tuple(row) for row in connection.execute(query)]
