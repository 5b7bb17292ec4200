"""Schema steps and copying, on both databases."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text

from shared.config import ledger_url
from shared.errors import LedgerError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.ledger.migrate import copy_ledger, run_steps, schema_version
from shared.ledger.migrations import HEAD
from shared.ledger.queries import count_by_state, find_trainer
from shared.ledger.tables import batches, engines, experiences, lineage, metadata, payloads
from shared.reward import Signal
from tests.support.experiences import record_ready, rows
from tests.support.lessons import record, say
from tests.support.processes import run_here
from tests.support.servers import make_config

NUMBERS = ("choice", "version", "version_end", "n_prompt", "n_reply", "temperature", "top_p", "top_k", "min_p")
ROW = dict.fromkeys((*NUMBERS, "created_at"), 0)  # of `experiences`
WHY = {"DISCARDED": "quarantined: its tokens are damaged"}


@pytest.fixture
def url(tmp_path, database_url, postgres) -> str:
    return ledger_url(postgres.new_database() if database_url else f"sqlite:///{tmp_path / 'ledger.sqlite3'}")


def insert(connection, table: str, **values: Any) -> None:
    """Insert a row into a table of an older schema."""
    binds = ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({binds})"), values)


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
        added = ("teaching", "rehearsable", "quarantined", "task_ready")
        assert after - before == {f"ix_experiences_{name}" for name in added}
        assert count_by_state(connection)["READY"] == 3
    ledger.close()


def test_engines_keep_their_owners_when_the_columns_are_renamed(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0005")
        owned = {"keeper": "explorer-a", "keeper_until": 12.5}
        insert(connection, "engines", url="http://e0", state="serving", version=7, generation=3, **owned)
    engine.dispose()
    ledger = Ledger.open(url)
    with ledger.read() as connection:
        (row,) = connection.execute(select(engines))
        assert tuple(row)[:6] == ("http://e0", "explorer-a", 12.5, "serving", 7, 3)
        assert (row.owner, row.owner_until) == ("explorer-a", 12.5)
    ledger.close()


def test_a_ledger_from_before_failed_updates_were_counted_keeps_its_rows_and_its_trainer(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0006")
        state = {"version": 7, "step": 7, "state_path": "trainer/trainer/state-000007"}
        insert(connection, "trainers", name="trainer", alive=False, heartbeat_at=12.5, **state)
    engine.dispose()
    ledger = Ledger.open(url)
    record_ready(ledger, rows(3))
    with ledger.write() as connection:
        trainer = find_trainer(connection, "trainer")
        assert (trainer.step, trainer.state_path, trainer.state_sha256, trainer.trouble) == (
            7, "trainer/trainer/state-000007", None, None
        )  # fmt: skip
        assert list(connection.execute(select(experiences.c.failures, experiences.c.deaths))) == [(0, 0)] * 3
        batch = transitions.claim(connection, owner="trainer", at_least=3, at_most=3, lease_s=60)
        assert not connection.execute(select(batches.c.updating).where(batches.c.id == batch)).scalar()
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


def test_a_ledger_moves_to_another_database_whole(tmp_path, postgres, monkeypatch, capsys):
    """SQLite to PostgreSQL and back, every row and every byte; and new rows go on after the old ones."""
    first, there, back = tmp_path / "first", postgres.new_database(), tmp_path / "back"
    config = make_config(first, ["http://127.0.0.1:1"])
    source = Ledger.open(config.ledger_url)
    record_ready(source, rows(2500))
    with source.write() as connection:
        transitions.claim(connection, owner="t", at_least=1, at_most=8, lease_s=60)
        before = content(connection)
    source.close()
    assert run_here(config, "migrate", "--to", there) == 0
    moved_config = config.model_copy(update={"database_url": there})
    monkeypatch.chdir(tmp_path)
    assert run_here(moved_config, "migrate", "--to", "sqlite:///back.sqlite3") == 0
    assert f"set database_url to sqlite:///{back}.sqlite3" in capsys.readouterr().out
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
        run_here(config, "migrate", "--to", there)


def test_a_ledger_that_explorers_or_trainers_still_write_is_not_moved_unless_forced(tmp_path):
    """What they write after the copy would be lost."""
    config, there = make_config(tmp_path, ["http://127.0.0.1:1"]), f"sqlite:///{tmp_path}/there.sqlite3"
    source = Ledger.open(config.ledger_url)
    record_ready(source, rows(1))
    with source.write() as connection:
        transitions.heartbeat(connection, "an-explorer", {})
        about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="a-trainer", **about)
    source.close()
    with pytest.raises(StartupError, match=r"explorer an-explorer and trainer a-trainer.*stop .*--force"):
        run_here(config, "migrate", "--to", there)
    assert not (tmp_path / "there.sqlite3").exists()
    assert run_here(config, "migrate", "--to", there, "--force") == 0


def test_a_ledger_moves_to_a_database_that_sorts_names_in_another_order(tmp_path):
    source, target = (Ledger.open(f"sqlite:///{tmp_path / name}.sqlite3") for name in ("source", "target"))
    with source.write() as connection:
        for name in ("engine B", "engine a"):
            transitions.acquire_lease(connection, name, "owner")
    with target.write() as connection:
        connection.execute(text("DROP TABLE leases"))
        columns = "name VARCHAR(200) COLLATE NOCASE PRIMARY KEY, owner VARCHAR(200), until FLOAT NOT NULL"
        connection.execute(text(f"CREATE TABLE leases ({columns})"))
    with source.read() as reading, target.write() as writing:
        assert copy_ledger(reading, writing, lambda *_: None)["leases"] == 2
    source.close()
    target.close()


def test_a_reward_of_minus_zero_does_not_end_a_move_to_sqlite_which_has_one_zero(tmp_path, postgres):
    source = Ledger.open(ledger_url(postgres.new_database()))
    target = Ledger.open(f"sqlite:///{tmp_path}/there.sqlite3")
    record(source, "m")
    say(source, "m", Signal("reward", value=-0.0))
    with source.write() as reading, target.write() as writing:
        assert copy_ledger(reading, writing, lambda *_: None)["signals"] == 1
    source.close()
    target.close()


def content(connection) -> list[tuple[object, ...]]:
    query = select(experiences, payloads.c.tokens).join(payloads).order_by(experiences.c.id)
    return [tuple(row) for row in connection.execute(query)]


def test_rows_of_a_ledger_from_before_lessons_keep_what_they_wait_for_and_what_they_were_trained_on(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0012")
        for name, state, reward, teaches in [
            ("waits", "RECORDED", 0.5, True), ("silent", "RECORDED", None, False),
            ("corrected", "READY", None, True), ("held", "LEASED", 1, True), ("done", "CONSUMED", 1, True),
        ]:  # fmt: skip
            insert(connection, "experiences", **ROW, msg_id=name, state=state, reward=reward, teaches=teaches)
        insert(connection, "signals", msg_id="corrected", choice=0, kind="correction", created_at=0)
    engine.dispose()
    ledger = Ledger.open(url)
    with ledger.write() as connection:
        columns = (experiences.c.msg_id, experiences.c.teaches, experiences.c.acts, experiences.c.taught)
        stands = {row[0]: tuple(row[1:]) for row in connection.execute(select(*columns))}
        assert stands == {
            "waits": (1, 0, 0), "silent": (0, 0, 0), "corrected": (4, 0, 0), "held": (1, 1, 0), "done": (0, 0, 1)
        }  # fmt: skip
        assert transitions.commit(connection) == (1, 2)
    ledger.close()


def test_rows_that_were_spoken_of_before_can_be_rehearsed(url):
    """The index has them, and so has one that goes back a step."""
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0018")
        old = _definition_of_rehearsable(connection)
    engine.dispose()
    ledger = Ledger.open(url)
    with ledger.read() as connection:
        assert old != _definition_of_rehearsable(connection) and "22" in _definition_of_rehearsable(connection)
    ledger.close()


def _definition_of_rehearsable(connection) -> str:
    table = {"sqlite": "sqlite_master", "postgresql": "pg_indexes"}[connection.dialect.name]
    name, definition = {"sqlite_master": ("name", "sql"), "pg_indexes": ("indexname", "indexdef")}[table]
    query = f"SELECT {definition} FROM {table} WHERE {name} = 'ix_experiences_rehearsable'"
    return str(connection.execute(text(query)).scalar_one())


def test_lineage_begins_with_the_versions_that_rows_of_an_older_ledger_tell(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        run_steps(connection, "0022")
        for state, version in (("CONSUMED", 3), ("LEASED", None), ("CONSUMED", 1)):
            insert(connection, "batches", owner="t", state=state, lease_until=0, consumed_version=version, created_at=0)
        for name, state, first, batch_id in [
            ("once", "CONSUMED", 1, 3), ("twice", "CONSUMED", 1, 1), ("again", "READY", 1, None),
            ("held", "LEASED", 1, 2), ("new", "LEASED", None, 2), ("spoiled", "DISCARDED", 1, 1),
        ]:  # fmt: skip
            about = {"state": state, "consumed_version": first, "batch_id": batch_id, "reason": WHY.get(state)}
            insert(connection, "experiences", **ROW, msg_id=name, **about)
    engine.dispose()
    ledger = Ledger.open(url)
    with ledger.read() as connection:
        query = select(experiences.c.msg_id, lineage.c.version).where(lineage.c.experience_id == experiences.c.id)
        found = [tuple(row) for row in connection.execute(query.order_by(*lineage.primary_key))]
    assert found == [("once", 1), ("twice", 1), ("twice", 3), ("again", 1), ("held", 1), ("spoiled", 1)]
    ledger.close()


def test_while_a_ledger_is_copied_writers_wait(url, tmp_path):
    source, target, writer = (
        Ledger.open(url),
        Ledger.open(f"sqlite:///{tmp_path}/copy.sqlite3"),
        Ledger.open(url, answering_within(1)),
    )
    record_ready(source, rows(2))
    refused = []

    def write(table: str, *_: int) -> None:
        with contextlib.suppress(LedgerError), writer.write() as connection:
            connection.execute(experiences.update().values(latency_s=1.0))
            return
        refused.append(table)

    with source.write() as reading, target.write() as writing:
        copy_ledger(reading, writing, write)
    assert {"experiences", "payloads", "signals"} <= set(refused)
    for ledger in (source, target, writer):
        ledger.close()
