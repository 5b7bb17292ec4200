"""Stored answers of feedback go after a day, and with the messages that they name, while others write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, select, update

from explorer_service import housekeeping
from explorer_service.background import Background
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.metrics import ExplorerMetrics
from shared.config import Config, ExplorerConfig
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.ledger.tables import idempotency
from tests.support.processes import run_here
from tests.support.samples import record


def remember(ledger: Ledger, keys: list[str], at: float, found: str = "another") -> None:
    answer = {"body": b"", "response": msgspec.json.encode({"states": "", "found": [found]}), "created_at": at}
    with ledger.write() as connection:
        connection.execute(insert(idempotency), [{"key": key, **answer} for key in keys])


def kept(ledger: Ledger) -> list[str]:
    with ledger.read() as connection:
        return list(connection.execute(select(idempotency.c.key).order_by(idempotency.c.key)).scalars())


def forget(ledger: Ledger) -> None:
    """What an explorer does every ten minutes."""

    async def run() -> None:
        metrics = ExplorerMetrics()
        reader, writer = LedgerReader(ledger, 60.0), LedgerWriter(ledger, metrics, Background())
        await housekeeping.Housekeeper(ExplorerConfig(), reader, writer, metrics, merges_counts=False)._forget()
        await writer.stop()
        await reader.stop()

    asyncio.run(run())


def beside_a_writer(query: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """The query, during which another process writes."""

    def found(*args: Any, **options: Any) -> Any:
        with closing(Ledger.open(config.ledger_url, answering_within(1.0))) as other, other.write():
            return query(*args, **options)

    return found


def test_answers_are_forgotten_after_a_day(ledger, config, monkeypatch):
    monkeypatch.setattr(housekeeping, "FORGOTTEN_AT_ONCE", 2)
    monkeypatch.setattr(housekeeping, "READ_AT_ONCE", 3)
    monkeypatch.setattr(queries, "answers_before", beside_a_writer(queries.answers_before, config))
    remember(ledger, [f"old{number}" for number in range(10)], at=time.time() - housekeeping.KEEP_ANSWERS_S - 60)
    remember(ledger, ["new"], at=time.time())
    forget(ledger)
    assert kept(ledger) == ["new"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_explorer_whose_host_is_two_days_behind_forgets_no_answer_of_today(ledger, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 2 * housekeeping.KEEP_ANSWERS_S)
    with ledger.write() as connection:
        transitions.remember_answer(connection, "answered", b"", b"{}")
        transitions.take_key(connection, "taken", b"")
    forget(ledger)
    assert kept(ledger) == ["answered", "taken"]


def test_a_key_that_is_used_again_is_kept(ledger):
    remember(ledger, ["old", "again"], at=1.0)
    keys = kept(ledger)
    with ledger.write() as connection:
        connection.execute(update(idempotency).where(idempotency.c.key == "again").values(created_at=3.0))
        transitions.forget_answers(connection, keys, before=2.0)
    assert kept(ledger) == ["again"]


@pytest.mark.parametrize("scope", [("--message", "chatcmpl-0000000"), ("--key", "k")])
def test_an_erasure_forgets_the_answers_that_name_its_messages(scope, ledger, config, monkeypatch):
    monkeypatch.setattr("services.commands.erase.ANSWERS_AT_ONCE", 2)
    monkeypatch.setattr(queries, "answers_about", beside_a_writer(queries.answers_about, config))
    (name,) = record(ledger, 1, key_name="k")
    remember(ledger, ["a", "b", "c"], at=1.0, found=f"{name}#1")
    remember(ledger, ["d"], at=1.0)
    assert run_here(config, "erase", *scope) == 0
    assert kept(ledger) == ["d"]
