"""The database is frozen, locked, replaced or away: callers hear 503 in time, and nothing acknowledged is lost."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import select, text

from shared.config import ExplorerConfig
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from tests.support.postgres import Postgres
from tests.support.servers import RunningExplorer, make_config, publish, served, wait_until
from tests.support.standstill import OwnClock

LIMIT_S = 5.0
CHATS = 6
DEFAULT_S = ExplorerConfig.model_fields["ledger_timeout_s"].default  # other tests wait for longer
clock = OwnClock()


@pytest.fixture(scope="module", autouse=True)
def ticking(tmp_path_factory) -> Iterator[None]:
    clock.start(tmp_path_factory.mktemp("clock"))
    yield
    clock.stop()


@pytest.fixture
def server() -> Iterator[Postgres]:
    running = Postgres()
    yield running
    running.stop()


@pytest.fixture
def on_postgres(scripted_engine, tmp_path, server) -> Iterator[RunningExplorer]:
    config = make_config(
        tmp_path, [scripted_engine.url], database_url=server.new_database(), ledger_timeout_s=DEFAULT_S
    )
    explorer = RunningExplorer(config).wait_ready()
    yield explorer
    explorer.stop()


@pytest.fixture
def on_sqlite(scripted_engine, tmp_path) -> Iterator[RunningExplorer]:
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url], ledger_timeout_s=DEFAULT_S)).wait_ready()
    yield explorer
    explorer.stop()


def timed(ask: Callable[[], httpx.Response]) -> tuple[httpx.Response, float]:
    began = clock.now()
    return ask(), clock.now() - began


def assert_all_refused(asked: list[Callable[[], httpx.Response]]) -> None:
    """503 with Retry-After for everyone, in time, though all ask at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        for reply, took_s in pool.map(timed, asked):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "ledger_unavailable"), reply.text
            assert "Retry-After" in reply.headers
            assert took_s < LIMIT_S


def everything(explorer: RunningExplorer, known: str) -> list[Callable[[], httpx.Response]]:
    http = explorer.http
    return [
        *[explorer.chat] * CHATS,
        *[lambda: http.post("/feedback", json={"msg_ids": [known], "reward": 1})] * 2,
        lambda: http.post("/commit"),
        lambda: http.get("/status"),
        lambda: http.get("/versions"),
    ]


def assert_recovers(explorer: RunningExplorer) -> None:
    began = clock.now()
    wait_until(lambda: explorer.chat().status_code == 200 and explorer.http.get("/ready").status_code == 200)
    assert clock.now() - began < LIMIT_S


def chat_stored(explorer: RunningExplorer) -> str:
    """The id of a message in the ledger. The disk may stand still for longer than a caller is let wait."""
    replies: list[httpx.Response] = []
    wait_until(lambda: replies.append(explorer.chat()) or replies[-1].status_code == 200)
    return str(replies[-1].json()["id"])


def stored(explorer: RunningExplorer) -> set[str]:
    with explorer.ledger.read() as connection:
        return set(connection.execute(select(experiences.c.msg_id)).scalars())


def test_a_frozen_postgresql_is_a_503_in_time_and_all_is_well_when_it_thaws(on_postgres, server):
    known = {on_postgres.chat().json()["id"] for _ in range(3)}

    def rate_a_run() -> httpx.Response:
        return on_postgres.http.post("/feedback", json={"task_id": "t", "run_id": "0", "reward": 1})

    server.freeze()
    try:
        for _ in range(2):
            assert_all_refused([*everything(on_postgres, next(iter(known))), *[rate_a_run] * 24])
        assert on_postgres.http.get("/ready").status_code == 503
        reply, took_s = timed(lambda: on_postgres.http.get("/metrics"))
        assert reply.status_code == 200
        assert took_s < LIMIT_S
    finally:
        server.thaw()
    assert_recovers(on_postgres)
    assert known <= stored(on_postgres)


def test_another_postgresql_on_the_same_address_is_taken_for_the_first(on_postgres, server):
    known = {on_postgres.chat().json()["id"] for _ in range(3)}
    server.fail_over()
    assert_recovers(on_postgres)
    assert known <= stored(on_postgres)


@contextmanager
def row_locked(explorer: RunningExplorer, msg_id: str) -> Iterator[None]:
    with psycopg.connect(explorer.config.database_url) as holder:
        holder.execute("SELECT 1 FROM experiences WHERE msg_id = %s FOR UPDATE", (msg_id,))
        yield
        holder.rollback()


def test_a_row_that_is_locked_costs_its_own_feedback_a_503_and_no_chat_anything(on_postgres):
    known = on_postgres.chat().json()["id"]

    def rate() -> httpx.Response:
        return on_postgres.http.post("/feedback", json={"msg_ids": [known], "reward": 1})

    with row_locked(on_postgres, known), ThreadPoolExecutor(5) as rated:
        refused, answered = [], 0
        while answered <= len(refused) < 50:  # again, if this process stood still while they waited
            waiting = [rated.submit(timed, rate) for _ in range(5)]
            while not all(future.done() for future in waiting):
                assert on_postgres.chat().status_code == 200
                answered += 1
            refused += waiting
        assert answered > len(refused), "a chat that waited for each of them would be one of as many"
        for reply, took_s in (future.result() for future in refused):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "ledger_unavailable")
            assert took_s < LIMIT_S
    assert rate().json()["receipts"][0]["state"] in ("applied", "duplicate")  # who was told 503 may be stored


def test_callers_who_wait_for_the_database_hold_up_no_reload(on_postgres):
    publish(on_postgres, 0)
    wait_until(lambda: served(on_postgres) == "0")
    enough = threading.Event()

    def read() -> None:
        with httpx.Client(base_url=on_postgres.url, timeout=30) as http:
            while not enough.is_set():
                http.get("/status")

    callers = [threading.Thread(target=read) for _ in range(24)]
    with on_postgres.ledger.write() as connection:
        connection.execute(text("LOCK TABLE trainers IN ACCESS EXCLUSIVE MODE"))  # what a reload does not read
        for caller in callers:
            caller.start()
        time.sleep(0.5)
        publish(on_postgres, 1)
        try:
            wait_until(lambda: served(on_postgres) == "1")
        finally:
            enough.set()
    for caller in callers:
        caller.join()


def test_a_chat_whose_earlier_turn_is_locked_fails_alone(on_postgres, scripted_engine):
    said: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    first = on_postgres.chat(messages=said).json()
    turn = [*said, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    with row_locked(on_postgres, first["id"]), ThreadPoolExecutor(CHATS) as pool:
        blocked = pool.submit(timed, lambda: on_postgres.chat(messages=turn))
        others = list(pool.map(timed, [on_postgres.chat] * CHATS))
        reply, took_s = blocked.result()
    assert [other.status_code for other, _ in others] == [200] * CHATS
    assert max(other_s for _, other_s in others) < LIMIT_S
    assert reply.status_code == 503
    assert took_s < LIMIT_S
    assert on_postgres.chat(messages=turn).status_code == 200


def test_a_locked_sqlite_is_a_503_in_time_and_all_is_well_when_it_is_free(on_sqlite):
    known = chat_stored(on_sqlite)
    holder = sqlite3.connect(on_sqlite.config.root / "ledger.sqlite3", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    asked = everything(on_sqlite, known)[:-2]  # who only reads is answered
    try:
        for _ in range(2):
            assert_all_refused(asked)
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert_recovers(on_sqlite)
    assert known in stored(on_sqlite)


def test_a_sqlite_file_that_is_moved_away_stores_nothing_until_it_is_back(on_sqlite):
    known = {chat_stored(on_sqlite) for _ in range(3)}
    root = on_sqlite.config.root
    away = root / "away"
    away.mkdir()
    files = sorted(root.glob("ledger.sqlite3*"))
    for file in files:
        file.rename(away / file.name)
    assert_all_refused(everything(on_sqlite, next(iter(known))))
    assert not list(root.glob("ledger.sqlite3*"))
    for file in reversed(files):  # the database last: it is opened with its log
        (away / file.name).rename(file)
    assert_recovers(on_sqlite)
    assert known <= stored(on_sqlite)


def test_nobody_waits_for_a_transaction_that_its_process_forgot(on_postgres):
    """A process of ours that stops in the middle of a transaction loses it, and with it its locks."""
    with on_postgres.ledger.read() as connection:
        assert connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == "1min"
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "1500ms"
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "2s"
    with closing(Ledger.open(on_postgres.config.ledger_url)) as of_trainer, of_trainer.read() as connection:
        assert connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == "1h"
