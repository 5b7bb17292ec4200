"""The database is full, locked or away: a clear 503 with Retry-After, nothing half-written, and back by itself."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from shared.errors import LedgerError
from shared.ledger.connect import DedicatedConnection
from shared.ledger.queries import count_by_state
from tests.support.postgres import Postgres, sqlite_alone
from tests.support.servers import RunningExplorer, make_config, publish, served, wait_until

pytestmark = pytest.mark.usefixtures("patient_health")
database_url = sqlite_alone  # its troubles are made here


def rows(explorer) -> int:
    with explorer.ledger.read() as connection:
        return sum(count_by_state(connection).values())


def driver_of(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def assert_refused(reply, code: str) -> None:
    assert reply.status_code == 503, reply.text
    assert "Retry-After" in reply.headers
    assert reply.json()["error"]["code"] == code


def before_each_transaction(monkeypatch, pragma: Callable[[], str]) -> None:
    """Of the explorer's writer, and of every other dedicated connection."""
    enter = DedicatedConnection.__enter__

    def entered(dedicated: DedicatedConnection) -> Connection:
        connection = enter(dedicated)
        driver_of(connection).execute(f"PRAGMA {pragma()}")
        return connection

    monkeypatch.setattr(DedicatedConnection, "__enter__", entered)


def test_a_full_disk_is_a_clear_503_and_nothing_half_written(explorer, monkeypatch):
    known = explorer.chat().json()["id"]
    with explorer.ledger.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    before_each_transaction(monkeypatch, lambda: f"max_page_count={pages}")
    answers = [explorer.chat() for _ in range(60)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert_refused(answer, "ledger_unavailable")
    stored = 1 + sum(answer.status_code == 200 for answer in answers)
    assert rows(explorer) == stored
    pages = 1 << 30
    assert explorer.chat().status_code == 200
    assert explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1}).json()["applied"] == 1


def test_a_full_disk_ends_a_stream_with_an_error_and_without_done(explorer, monkeypatch):
    before_each_transaction(monkeypatch, lambda: "query_only=ON")
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert "[DONE]" not in lines[-1]
    assert '"ledger_unavailable"' in lines[-1]


def test_a_locked_database_is_a_clear_503_and_chats_go_on_when_it_is_free(scripted_engine, start_explorer, tmp_path):
    explorer = start_explorer([scripted_engine.url], ledger_timeout_s=1).wait_ready()
    file = explorer.config.root / "ledger.sqlite3"
    holder = sqlite3.connect(file, timeout=240, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        assert_refused(explorer.chat(), "ledger_unavailable")
        assert_refused(explorer.http.post("/feedback", json={"msg_ids": ["x"], "reward": 1}), "ledger_unavailable")
        assert_refused(explorer.http.post("/commit"), "ledger_unavailable")
        assert_refused(explorer.http.get("/ready"), "ledger_unavailable")
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    wait_until(lambda: explorer.chat().status_code == 200)
    assert make_config(tmp_path, [scripted_engine.url])


def test_a_chat_waits_for_a_database_that_is_locked_for_less_than_the_time_limit(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], ledger_timeout_s=30).wait_ready()
    file = explorer.config.root / "ledger.sqlite3"
    holder = sqlite3.connect(file, timeout=240, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    unlock = threading.Timer(12.0, holder.rollback)
    unlock.start()
    try:
        assert explorer.chat().status_code == 200
    finally:
        unlock.join()
        holder.close()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ('could not extend file "base/5/16384": No space left on device', r"free space there$"),
        ("FATAL:  sorry, too many clients already", r"raise PostgreSQL's max_connections, or lower explorer\.workers"),
        ("FATAL:  remaining connection slots are reserved for roles with SUPERUSER", r"max_connections"),
    ],
)
def test_what_postgresql_lacks_is_named_with_its_remedy(ledger, said, remedy):
    with pytest.raises(LedgerError, match=remedy), ledger.read():
        raise OperationalError("SELECT 1", {}, Exception(said))


def test_postgresql_is_killed_and_comes_back(scripted_engine, tmp_path, caplog):
    """503 while it is away; chats, feedback and reloads go on by themselves; what was acknowledged is there."""
    server = Postgres()
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url], database_url=server.new_database()))
    try:
        known = explorer.wait_ready().chat().json()["id"]
        server.kill()
        assert_refused(explorer.chat(), "ledger_unavailable")
        assert_refused(explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1}), "ledger_unavailable")
        assert_refused(explorer.http.get("/status"), "ledger_unavailable")
        assert explorer.http.get("/health").status_code == 200
        assert explorer.http.get("/metrics").status_code == 200
        server.start()
        wait_until(lambda: explorer.http.get("/ready").status_code == 200)
        assert explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1}).json()["applied"] == 1
        publish(explorer, 1)
        wait_until(lambda: served(explorer) == "1")
        assert not [record for record in caplog.records if record.exc_info], "lost connections are no surprise"
    finally:
        explorer.stop()
        server.stop()
