"""What the database refuses of the explorer's writes: a deadlock is avoided or repeated, and no other write fails."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import Connection

from shared.ledger.connect import placeholder
from shared.ledger.queries import count_by_state
from tests.support.servers import RunningExplorer, make_config, wait_until

DEADLOCK_ONCE = """CREATE SEQUENCE tries;
CREATE FUNCTION deadlock_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('tries') = 1 THEN RAISE 'deadlock detected' USING ERRCODE = '40P01'; END IF; RETURN NEW;
END $$;
CREATE TRIGGER deadlock_once BEFORE INSERT ON signals FOR EACH ROW EXECUTE FUNCTION deadlock_once()"""


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_deadlocked_feedback_is_repeated(explorer):
    known = explorer.chat().json()["id"]
    with psycopg.connect(explorer.config.database_url) as connection:
        connection.execute(DEADLOCK_ONCE)
    reply = explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1})
    assert reply.status_code == 200, reply.text
    assert reply.json()["receipts"][0]["state"] == "applied"
    with psycopg.connect(explorer.config.database_url) as connection:
        assert connection.execute("SELECT last_value, (SELECT count(*) FROM signals) FROM tries").fetchone() == (2, 1)


def test_feedback_locks_its_rows_in_the_order_of_their_ids(scripted_engine, tmp_path, postgres):
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:  # a scan of the table finds rows in the order of the file
        for scan in ("indexscan", "bitmapscan"):
            connection.execute(f"ALTER DATABASE {connection.info.dbname} SET enable_{scan} = off")
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url], database_url=url)).wait_ready()
    try:
        first, second = (explorer.chat().json()["id"] for _ in range(2))
        with ThreadPoolExecutor(1) as pool, psycopg.connect(url) as holder:
            holder.execute("UPDATE experiences SET task_id = task_id WHERE msg_id = %s", [first])
            holder.commit()  # now the first stands behind the second
            holder.execute("SELECT id FROM experiences WHERE msg_id = %s FOR UPDATE", [first])
            rated = pool.submit(explorer.http.post, "/feedback", json={"msg_ids": [second, first], "reward": 1})
            wait_until(lambda: holder.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (0,))
            holder.execute("SELECT id FROM experiences WHERE msg_id = %s FOR UPDATE NOWAIT", [second])
            holder.commit()
            assert rated.result().status_code == 200
    finally:
        explorer.stop()


OTHERS = """SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def test_feedback_on_the_same_messages_in_opposite_orders_is_stored(scripted_engine, tmp_path, postgres):
    url = postgres.new_database()
    patient = {"database_url": url, "ledger_timeout_s": 60.0}
    config = [make_config(tmp_path, [scripted_engine.url], **patient) for _ in range(2)]
    both = [RunningExplorer(one).wait_ready() for one in config]
    try:
        ids = [both[0].chat().json()["id"] for _ in range(40)]
        orders = (ids, ids[::-1])

        def rate(number: int) -> list[str]:
            bodies = [{"msg_ids": orders[number % 2], "reward": reward + 10 * number} for reward in range(6)]
            with httpx.Client(base_url=both[number % 2].url, timeout=120) as http:
                replies = [http.post("/feedback", json=body) for body in bodies]
            return [reply.text for reply in replies if reply.status_code != 200]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(rate, range(4))) == [[]] * 4
    finally:
        for explorer in both:
            explorer.stop()
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: connection.execute(OTHERS).fetchone() == (0,))  # a session counts its deadlocks at its end
        assert connection.execute(DEADLOCKS).fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM signals").fetchone() == (4 * 6 * len(ids),)


def test_one_statement_that_is_refused_leaves_its_group_alone(explorer):
    """Too many parameters are an OperationalError, as a full disk is."""
    writer = explorer.deps.feedback_writer
    count = 300_000 if explorer.config.database_url is None else 66_000

    def too_many(connection: Connection) -> None:
        places = ",".join([placeholder(connection)] * count)
        connection.exec_driver_sql(f"SELECT 1 WHERE 1 IN ({places})", tuple(range(count)))

    async def together() -> list[Any]:
        busy = writer.write(lambda _: time.sleep(0.2))  # what comes meanwhile is one group
        jobs = [busy, writer.write(too_many), *(writer.write(count_by_state) for _ in range(5))]
        return await asyncio.gather(*jobs, return_exceptions=True)

    _, refused, *others = asyncio.run_coroutine_threadsafe(together(), writer._loop).result(60)
    assert "refuses this" in str(refused)
    assert all(isinstance(other, dict) for other in others)
    assert explorer.http.get("/ready").status_code == 200
